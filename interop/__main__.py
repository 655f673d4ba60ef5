"""``python -m interop``."""

from .cli import main

raise SystemExit(main())

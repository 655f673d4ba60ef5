"""The command line: ``python -m interop demo | bench | doctor``. Parses and hands over; a command's module is imported when it runs."""

from __future__ import annotations

import argparse
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit status is 0 where all it set out to show holds, 1 where something does not, 2 for a wrong call."""
    args = _parser().parse_args(argv)
    if args.command == "demo":
        from .demo import demo

        return demo(quick=args.quick)
    if args.command == "bench":
        from .bench import bench

        return bench(args.filter, form="json" if args.json else "markdown" if args.markdown else "table", quick=args.quick)
    from .health import doctor

    return doctor()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m interop", description="Tensor memory shared between frameworks without copying.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    demo = commands.add_parser("demo", help="convert between all installed frameworks and prove that the memory is shared")
    demo.add_argument("--quick", action="store_true", help="time each conversion for an instant only")
    bench = commands.add_parser("bench", help="time each conversion against the user's own way")
    bench.add_argument("filter", nargs="*", metavar="FILTER", help="only rows whose name contains one of these")
    bench.add_argument("--json", action="store_true", help="machine-readable, with the versions of all that took part")
    bench.add_argument("--markdown", action="store_true", help="the table as README.md shows it")
    bench.add_argument("--quick", action="store_true", help="fewer rounds")
    commands.add_parser("doctor", help="say what is installed, what is missing and the command that installs it")
    return parser

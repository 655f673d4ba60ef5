"""Tables for terminals: with rich where it is installed and somebody looks, plain text otherwise. Knows nothing of what they say."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

#: Cells that carry a verdict and the colour of each; what a cell says is never said by colour alone.
_COLOURS = {"ok": "green", "shared": "green", "yes": "green", "short": "yellow", "skipped": "yellow", "missing": "yellow",
            "FAILED": "bold red"}  # fmt: skip


def show(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], notes: Sequence[str] = ()) -> None:
    """Print a table. Columns whose name starts with ``>`` are aligned to the right; `notes` follow below, one a line."""
    body = [[*row] for row in rows]
    if not (sys.stdout.isatty() and _rich(title, columns, body)):
        print(plain(title, columns, body), end="")
    for note in notes:
        print(note)
    print(flush=True)


def plain(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The table as text, without colours and as wide as it needs to be."""
    names = [c.removeprefix(">") for c in columns]
    widths = [max(len(row[i]) for row in [names, *rows]) for i in range(len(names))]

    def line(row: Sequence[str]) -> str:
        return "  ".join(c.rjust(w) if h.startswith(">") else c.ljust(w) for c, w, h in zip(row, widths, columns, strict=True)).rstrip()

    return "\n".join([title, "", line(names), line(["-" * w for w in widths]), *map(line, rows)]) + "\n"


def markdown(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """The table as GitHub's Markdown, for a README."""
    lines = [[c.removeprefix(">") for c in columns], ["--:" if c.startswith(">") else "---" for c in columns], *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def _rich(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> bool:
    try:
        from rich import box
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        return False
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for c in columns:
        table.add_column(c.removeprefix(">"), justify="right" if c.startswith(">") else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(c, style=_COLOURS.get(c.partition(" ")[0], "")) for c in row))
    Console().print(table)
    return True

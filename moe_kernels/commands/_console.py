"""How subcommands print tables."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text


def console() -> Console:
    """Standard output; wide enough for tables when it is no terminal."""
    out = Console(highlight=False)
    return out if out.is_terminal else Console(highlight=False, width=160)


class PlainTable(Table):
    """A table whose cells are text as it is, without markup."""

    def add_row(self, *cells, **keywords) -> None:  # type: ignore[override]
        """Add a row of anything that `str` takes."""
        super().add_row(*(Text(str(cell)) for cell in cells), **keywords)


def table(*columns: str, title: str | None = None) -> PlainTable:
    """An empty table; a column whose name ends in `#` is right-aligned (the mark is dropped)."""
    made = PlainTable(box=box.SIMPLE_HEAD, title=title, title_justify="left", pad_edge=False)
    for name in columns:
        right = name.endswith("#")
        made.add_column(name.removesuffix("#"), justify="right" if right else "left", overflow="fold")
    return made

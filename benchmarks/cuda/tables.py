"""Tables of a report, in Markdown."""

from collections.abc import Iterable, Sequence

NOTHING = "-"


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table, or an empty string if there are no rows."""
    lines = [_line(row) for row in rows]
    if not lines:
        return ""
    return "\n".join([_line(columns), "|".join(["", *["---"] * len(columns), ""]), *lines])


def number(value: float | None) -> str:
    """A figure with three significant digits, or a dash."""
    if value is None:
        return NOTHING
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"  # noqa: PLR2004


def _line(cells: Sequence[object]) -> str:
    return "| " + " | ".join(str(cell) for cell in cells) + " |"

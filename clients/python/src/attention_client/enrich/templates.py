"""Templates of texts: one text for each row, made of one or several columns."""

from collections.abc import Iterator
from dataclasses import dataclass
from string import Formatter

from attention_client.enrich.errors import EnrichError

BRACES = "write {{ and }} for braces that belong to the text"


@dataclass(frozen=True)
class TextTemplate:
    """Literal texts between columns.

    Attributes:
        source: The template as it was written; two templates are equal if these are.
        parts: Literal texts, each with the column that follows it; the last one may lack a column.
    """

    source: str
    parts: tuple[tuple[str, str | None], ...]

    @classmethod
    def parse(cls, template: str) -> "TextTemplate":
        """Reads a template such as "{title}: {body}".

        Raises:
            EnrichError: It has a brace without its other half, a field that is not the name of a column, or
                no column at all.
        """
        try:
            parts = tuple(_parts(template))
        except ValueError as error:
            raise EnrichError(f"template {template!r}: {str(error).lower()}; {BRACES}") from error
        if not any(column for _, column in parts):
            raise EnrichError(
                f"template {template!r} names no column; a name in braces does, as in {{title}}"
            )
        return cls(template, parts)

    @classmethod
    def of_column(cls, column: str) -> "TextTemplate":
        """The text of one column."""
        return cls(column, (("", column),))

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns, each once."""
        return tuple(dict.fromkeys(column for _, column in self.parts if column is not None))

    def render(self, texts: "dict[str, list[str | None]]") -> list[str | None]:
        """One text for each row. A null counts as an empty text; a row of nulls only has none.

        Args:
            texts: The cells of each of the columns.
        """
        rows = zip(*(texts[column] for column in self.columns), strict=True)
        return [self._render_row(row) for row in rows]

    def _render_row(self, cells: tuple[str | None, ...]) -> str | None:
        if all(cell is None for cell in cells):
            return None
        named = dict(zip(self.columns, cells, strict=True))
        return "".join(literal + ((named[column] or "") if column else "") for literal, column in self.parts)


def _parts(template: str) -> Iterator[tuple[str, str | None]]:
    for literal, column, form, conversion in Formatter().parse(template):
        if column == "":
            raise EnrichError(f"template {template!r} has braces without the name of a column; {BRACES}")
        if form or conversion:
            raise EnrichError(
                f"template {template!r} has a format or a conversion after {column!r}; only the name of a "
                "column may stand in braces"
            )
        yield literal, column

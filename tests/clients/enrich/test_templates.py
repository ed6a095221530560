"""Templates of texts."""

import pytest
from attention_client.enrich import EnrichError
from attention_client.enrich.texts import TextTemplate

CELLS = {"title": ["A", None, "", None], "body": ["b", "c", None, None]}


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{body}: {title}, {body}!", ["b: A, b!", "c: , c!", ": , !", None]),
        ("{{{title}}} {{}}", ["{A} {}", None, "{} {}", None]),
    ],
)
def test_a_null_counts_as_an_empty_text_and_a_row_of_nulls_as_null(
    template: str, expected: list[str | None]
) -> None:
    parsed = TextTemplate.parse(template)
    assert parsed.render({name: CELLS[name] for name in parsed.columns}) == expected


def test_a_template_names_each_of_its_columns_once() -> None:
    assert TextTemplate.parse("{b} {a b.c} {b}").columns == ("b", "a b.c")


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{title", "expected '}' before end of string; write {{ and }} for braces"),
        ("{} {body}", "has braces without the name of a column"),
        ("{title!r}", "has a format or a conversion after 'title'"),
        ("{title:>10}", "has a format or a conversion after 'title'"),
        ("{{title}}", "names no column; a name in braces does, as in {title}"),
    ],
)
def test_a_template_that_cannot_be_read_is_refused(template: str, words: str) -> None:
    with pytest.raises(EnrichError) as caught:
        TextTemplate.parse(template)
    assert str(caught.value).startswith(f"template {template!r}")
    assert words in str(caught.value)

"""docs/client.md is generated from the client's docstrings."""

from scripts.generate_client_reference import PAGE, reference


def test_the_page_is_current() -> None:
    assert PAGE.read_text() == reference(), "run python -m scripts.generate_client_reference"

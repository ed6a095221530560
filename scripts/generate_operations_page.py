"""Writes the tables of docs/reference.md that follow from the code.

`python -m scripts.generate_operations_page` replaces what is between the markers `<!-- NAME -->` and
`<!-- end -->`; with `--check` it exits with 1 if the page is not current.
"""

import argparse
import re
import sys
from collections.abc import Callable
from pathlib import Path

from scripts.operations_tables import metrics_table, reasons_table, settings_tables

PAGE = Path(__file__).resolve().parents[1] / "docs/reference.md"
MARKED = re.compile(r"<!-- (?P<name>[a-z ]+) -->\n.*?<!-- end -->", re.DOTALL)
TABLES: dict[str, Callable[[], str]] = {
    "settings": settings_tables,
    "metrics": metrics_table,
    "reasons": reasons_table,
}


def main() -> int:
    """Writes or checks the page and returns the exit status."""
    parser = argparse.ArgumentParser(description="Write the tables of docs/reference.md from the code.")
    parser.add_argument("--check", action="store_true", help="exit with 1 if the page is not current")
    page = generated(PAGE.read_text())
    if parser.parse_args().check:
        return int(PAGE.read_text() != page)
    PAGE.write_text(page)
    return 0


def generated(page: str) -> str:
    """The page with current tables.

    Raises:
        ValueError: The page has not each table once.
    """
    names = sorted(found["name"] for found in MARKED.finditer(page))
    if names != sorted(TABLES):
        raise ValueError(f"the page has the tables {', '.join(names)}; expected {', '.join(sorted(TABLES))}")
    return MARKED.sub(lambda found: _marked(found["name"]), page)


def _marked(name: str) -> str:
    return f"<!-- {name} -->\n{TABLES[name]()}\n<!-- end -->"


if __name__ == "__main__":
    sys.exit(main())

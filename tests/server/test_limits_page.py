"""docs/limits.md states every limit of the settings with its default."""

import re
from pathlib import Path

import pytest
from pydantic import BaseModel, ByteSize

from attention_serving.server.engine.limits import MIB
from attention_serving.server.settings import SECTIONS

PAGE = (Path(__file__).parents[2] / "docs/limits.md").read_text()
# Settings that bound something, by their names.
LIMIT = re.compile(r"max_.*|(?!repository_poll|canary).*_seconds")


def stated(default: object) -> str:
    """A default as the page writes it."""
    if isinstance(default, ByteSize) and default:
        return f"{default // MIB} MiB"
    return f"{default:,g}" if isinstance(default, int | float) else str(default)


def limits(section: type[BaseModel]) -> list[tuple[str, str]]:
    return [
        (name, stated(field.default)) for name, field in section.model_fields.items() if LIMIT.fullmatch(name)
    ]


@pytest.mark.parametrize(
    ("name", "default"), [limit for section in SECTIONS.values() for limit in limits(section)]
)
def test_the_page_states_the_limit_and_its_default(name: str, default: str) -> None:
    rows = [line.split("|") for line in PAGE.splitlines() if line.startswith(f"| `{name}` |")]
    assert len(rows) == 1
    assert rows[0][2].strip().startswith(default)

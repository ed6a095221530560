"""Which keys the rows of a model may attend to, as its manifest states it."""

from pathlib import Path
from typing import Any

import pytest

from attention_serving.artifact.manifest import Manifest
from attention_serving.artifact.patterns import AttentionPattern, attention_patterns
from tests.server import samples


@pytest.fixture(scope="module")
def manifest(artifacts: Path) -> Manifest:
    """That of a causal module."""
    return Manifest.load(artifacts / samples.SELF / "1")


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        pytest.param({"causal": True, "window": 7}, (True, 7), id="both"),
        pytest.param({"causal": False, "window": 0}, (False, 0), id="none"),
        pytest.param({}, (True, 0), id="not-stated"),
        pytest.param({"window": "7"}, (True, 0), id="not-a-number"),
        pytest.param({"window": -1}, (True, 0), id="negative"),
        pytest.param({"window": 2**40}, (True, 0), id="too-large"),
    ],
)
def test_the_rule_of_a_module(manifest: Manifest, config: dict[str, Any], expected: tuple[bool, int]) -> None:
    stated = manifest.model_copy(update={"config": config})
    assert attention_patterns(stated) == (AttentionPattern(*expected),)


def test_a_module_without_heads_has_none(manifest: Manifest) -> None:
    assert attention_patterns(manifest.model_copy(update={"num_heads": 0})) == ()

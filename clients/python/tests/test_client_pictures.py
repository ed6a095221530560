"""Attention weights as a page that loads nothing."""

import base64
import hashlib
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from attention_client import AttentionResult
from attention_client._commands.weights import MAX_ROWS, page_answer, save
from attention_client._models import PatternInfo

SHAPE = LAYERS, HEADS, QUERIES, KEYS = 2, 3, 2, 4
HOSTILE = "</script><script>alert(1)</script><!-- ünïcode 🍰"
TEXT = f"a{HOSTILE}"
PATTERNS = [PatternInfo(causal=True, window=0), PatternInfo(causal=False, window=2)]


def answer(model: str, weights: Any, mask: Any = None) -> dict[str, Any]:
    """The answer of a text of two tokens."""
    offsets = np.array([(0, 1), (1, len(TEXT))])
    result: Any = AttentionResult(weights[0], weights, model, "3", offsets)
    return page_answer(result, {"text": TEXT, "mask": mask}, PATTERNS)


@pytest.mark.parametrize("shape", [(KEYS,), (QUERIES, KEYS), (HEADS, QUERIES, KEYS)])
def test_the_answers_of_a_page_are_those_that_were_given(shape: tuple[int, ...], tmp_path: Path):
    mask = np.random.default_rng(1).random(shape) < 0.5
    weights = {"m": np.random.default_rng(0).random(SHAPE, np.float32), "n": np.zeros(SHAPE, np.float32)}
    path = tmp_path / "page.html"
    size = save([answer("m", weights["m"], mask), answer("n", weights["n"])], path)
    assert size == path.stat().st_size
    data = re.search(r'<script type="application/json" id="answers">(.*?)</script>', path.read_text("utf-8"))
    page = json.loads((data or "")[1])
    for model, (name, array) in zip(page, weights.items(), strict=True):
        numbers = np.frombuffer(base64.b64decode(model["weights"]), "<f4")
        np.testing.assert_array_equal(numbers.reshape(SHAPE), array)
        assert (model["layers"], model["heads"]) == (LAYERS, HEADS)
        assert (model["model"], model["version"], model["subject"]) == (name, "3", TEXT)
        assert (model["queries"], model["keys"]) == (["a", HOSTILE], ["0", "1", "2", "3"])
        assert model["patterns"] == [{"causal": True, "window": 0}, {"causal": False, "window": 2}]
    packed = np.frombuffer(base64.b64decode(page[0]["mask"]["bits"]), np.uint8)
    bits = np.unpackbits(packed, count=mask.size, bitorder="little")
    np.testing.assert_array_equal(bits.reshape(page[0]["mask"]["shape"]), mask)
    assert page[1]["mask"] is None


def test_a_page_may_load_nothing_and_text_cannot_end_its_element(tmp_path: Path):
    path = tmp_path / "page.html"
    save([answer("m", np.zeros(SHAPE, np.float32))], path)
    page = path.read_text("utf-8")
    assert "<script>alert(1)" not in page
    (policy,) = re.findall(r'<meta http-equiv="Content-Security-Policy" content="([^"]+)">', page)
    allowed = dict(directive.split(" ", 1) for directive in policy.split("; "))
    assert allowed.keys() == {"default-src", "script-src", "style-src", "base-uri", "form-action"}
    assert allowed["default-src"] == "'none'"
    for element in ("script", "style"):
        (content,) = re.findall(rf"<{element}>(.*?)</{element}>", page, re.DOTALL)
        expected = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert allowed[f"{element}-src"] == f"'sha256-{expected}'"
    outside = re.sub(r'<pre id="licences">.*?</pre>', "", page, flags=re.DOTALL)
    assert not re.search(r"<(?:link|img|iframe|object|embed)\b|\b(?:src|href)=|@import|url\(", outside)


@pytest.mark.parametrize("shape", [(1, 1, MAX_ROWS + 1, 1), (1, 1, 1, MAX_ROWS + 1), (17, 16, 256, 256)])
def test_too_much_for_a_page_is_refused_with_the_numbers(shape: tuple[int, ...]):
    with pytest.raises(ValueError, match=f"a page draws at most {MAX_ROWS} rows and 16777216 weights"):
        answer("m", np.zeros(shape, np.float32))

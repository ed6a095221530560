"""The page of `weights --html`: what it contains, and that it loads nothing."""

import base64
import hashlib
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from attention_client._models import PatternInfo
from attention_client._weights_page import MAX_ROWS, PageAnswer, save

LAYERS, HEADS, QUERIES, KEYS = 2, 3, 2, 4
HOSTILE = "</script><script>alert(1)</script><!-- ünïcode 🍰"


def answer(**given: Any):
    weights = np.random.default_rng(0).random((LAYERS, HEADS, QUERIES, KEYS), np.float32)
    values = {
        "model": "m",
        "version": "3",
        "subject": HOSTILE,
        "queries": ["a", HOSTILE],
        "keys": ["a", "b", "c", "d"],
        "weights": weights,
        "patterns": [PatternInfo(causal=True, window=0), PatternInfo(causal=False, window=2)],
    }
    return PageAnswer(**(values | given))


def parts(path: Path):
    """The page and the answers in it."""
    page = path.read_text(encoding="utf-8")
    before, _, rest = page.partition('<script type="application/json" id="answers">')
    data, _, after = rest.partition("</script>")
    return before + after, json.loads(data)


def test_the_answers_are_those_that_were_given(tmp_path: Path):
    first, second = answer(), answer(model="n", weights=np.zeros((LAYERS, HEADS, QUERIES, KEYS), np.float32))
    path = tmp_path / "page.html"
    assert save([first, second], path) == path.stat().st_size
    _, found = parts(path)
    assert [each["model"] for each in found] == ["m", "n"]
    for each, given in zip(found, (first, second), strict=True):
        weights = np.frombuffer(base64.b64decode(each["weights"]), "<f4")
        np.testing.assert_array_equal(weights.reshape(given.weights.shape), given.weights)
        assert (each["layers"], each["heads"]) == (LAYERS, HEADS)
        assert (each["subject"], each["queries"], each["keys"]) == (HOSTILE, given.queries, given.keys)
        assert each["patterns"] == [{"causal": True, "window": 0}, {"causal": False, "window": 2}]
        assert each["mask"] is None


@pytest.mark.parametrize("shape", [(KEYS,), (QUERIES, KEYS), (HEADS, QUERIES, KEYS)])
def test_a_mask_is_kept_bit_by_bit(shape: tuple[int, ...], tmp_path: Path):
    mask = np.random.default_rng(1).random(shape) < 0.5
    path = tmp_path / "page.html"
    save([answer(mask=mask)], path)
    found = parts(path)[1][0]["mask"]
    assert found["shape"] == list(shape)
    bits = np.unpackbits(
        np.frombuffer(base64.b64decode(found["bits"]), np.uint8), count=mask.size, bitorder="little"
    )
    np.testing.assert_array_equal(bits.reshape(shape), mask)


def test_the_page_may_load_nothing_and_ask_nobody(tmp_path: Path):
    path = tmp_path / "page.html"
    save([answer()], path)
    page, _ = parts(path)
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


def test_text_cannot_end_the_element_that_contains_it(tmp_path: Path):
    path = tmp_path / "page.html"
    save([answer()], path)
    assert "alert(1)" in path.read_text(encoding="utf-8")
    assert "<script>alert(1)" not in path.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "shape", [(1, 1, MAX_ROWS + 1, 1), (1, 1, 1, MAX_ROWS + 1), (17, 16, MAX_ROWS, MAX_ROWS)], ids=str
)
def test_too_much_for_a_page_is_refused_with_the_numbers(shape: tuple[int, ...], tmp_path: Path):
    path = tmp_path / "page.html"
    with pytest.raises(ValueError, match=f"a page draws at most {MAX_ROWS} rows and 16777216 weights"):
        save([answer(weights=np.zeros(shape, np.float32))], path)
    assert not path.exists()

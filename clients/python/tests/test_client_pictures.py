"""Attention weights as a page that loads nothing."""

import base64
import hashlib
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from attention_client._commands.weights_page import MAX_ROWS, page_answer, save
from attention_client._models import PatternInfo

SHAPE = LAYERS, HEADS, QUERIES, KEYS = 2, 3, 2, 4
HOSTILE = "</script><script>alert(1)</script><!-- ünïcode 🍰"


def answer(**given: Any) -> dict[str, Any]:
    values = {
        "model": "m",
        "version": "3",
        "subject": HOSTILE,
        "queries": ["a", HOSTILE],
        "keys": ["a", "b", "c", "d"],
        "weights": np.random.default_rng(0).random(SHAPE, np.float32),
        "patterns": [PatternInfo(causal=True, window=0), PatternInfo(causal=False, window=2)],
    }
    return values | given


@pytest.mark.parametrize("shape", [(KEYS,), (QUERIES, KEYS), (HEADS, QUERIES, KEYS)])
def test_the_answers_of_a_page_are_those_that_were_given(shape: tuple[int, ...], tmp_path: Path):
    mask = np.random.default_rng(1).random(shape) < 0.5
    given = [answer(mask=mask), answer(model="n", weights=np.zeros(SHAPE, np.float32))]
    path = tmp_path / "page.html"
    assert save([page_answer(**each) for each in given], path) == path.stat().st_size
    data = re.search(r'<script type="application/json" id="answers">(.*?)</script>', path.read_text("utf-8"))
    found = json.loads((data or "")[1])
    for each, own in zip(found, given, strict=True):
        weights = np.frombuffer(base64.b64decode(each["weights"]), "<f4")
        np.testing.assert_array_equal(weights.reshape(SHAPE), own["weights"])
        assert (each["layers"], each["heads"]) == (LAYERS, HEADS)
        assert all(each[name] == own[name] for name in ("model", "subject", "queries", "keys"))
        assert each["patterns"] == [{"causal": True, "window": 0}, {"causal": False, "window": 2}]
    packed = np.frombuffer(base64.b64decode(found[0]["mask"]["bits"]), np.uint8)
    bits = np.unpackbits(packed, count=mask.size, bitorder="little")
    np.testing.assert_array_equal(bits.reshape(found[0]["mask"]["shape"]), mask)
    assert found[1]["mask"] is None


def test_a_page_may_load_nothing_and_text_cannot_end_its_element(tmp_path: Path):
    path = tmp_path / "page.html"
    save([page_answer(**answer())], path)
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
        page_answer(**answer(weights=np.zeros(shape, np.float32)))

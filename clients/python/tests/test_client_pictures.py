"""Attention weights as heat maps, and as a page that loads nothing."""

import base64
import hashlib
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from attention_client._commands.weights_page import MAX_ROWS, PageAnswer, save
from attention_client._models import PatternInfo

SHAPE = LAYERS, HEADS, QUERIES, KEYS = 2, 3, 2, 4
HOSTILE = "</script><script>alert(1)</script><!-- ünïcode 🍰"
WORDS = ["eat", "$\\nonesuch$", "first"]  # a word with dollar signs is not a formula


def answer(**given: Any):
    values = {
        "model": "m",
        "version": "3",
        "subject": HOSTILE,
        "queries": ["a", HOSTILE],
        "keys": ["a", "b", "c", "d"],
        "weights": np.random.default_rng(0).random(SHAPE, np.float32),
        "patterns": [PatternInfo(causal=True, window=0), PatternInfo(causal=False, window=2)],
    }
    return PageAnswer(**(values | given))


@pytest.mark.parametrize("shape", [(KEYS,), (QUERIES, KEYS), (HEADS, QUERIES, KEYS)])
def test_the_answers_of_a_page_are_those_that_were_given(shape: tuple[int, ...], tmp_path: Path):
    mask = np.random.default_rng(1).random(shape) < 0.5
    given = [answer(mask=mask), answer(model="n", weights=np.zeros(SHAPE, np.float32))]
    path = tmp_path / "page.html"
    assert save(given, path) == path.stat().st_size
    data = re.search(r'<script type="application/json" id="answers">(.*?)</script>', path.read_text("utf-8"))
    found = json.loads((data or "")[1])
    for each, own in zip(found, given, strict=True):
        weights = np.frombuffer(base64.b64decode(each["weights"]), "<f4")
        np.testing.assert_array_equal(weights.reshape(SHAPE), own.weights)
        assert (each["model"], each["layers"], each["heads"]) == (own.model, LAYERS, HEADS)
        assert (each["subject"], each["queries"], each["keys"]) == (HOSTILE, own.queries, own.keys)
        assert each["patterns"] == [{"causal": True, "window": 0}, {"causal": False, "window": 2}]
    stored = found[0]["mask"]
    packed = np.frombuffer(base64.b64decode(stored["bits"]), np.uint8)
    bits = np.unpackbits(packed, count=mask.size, bitorder="little")
    np.testing.assert_array_equal(bits.reshape(stored["shape"]), mask)
    assert found[1]["mask"] is None


def test_a_page_may_load_nothing_and_text_cannot_end_its_element(tmp_path: Path):
    path = tmp_path / "page.html"
    save([answer()], path)
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
def test_too_much_for_a_page_is_refused_with_the_numbers(shape: tuple[int, ...], tmp_path: Path):
    path = tmp_path / "page.html"
    with pytest.raises(ValueError, match=f"a page draws at most {MAX_ROWS} rows and 16777216 weights"):
        save([answer(weights=np.zeros(shape, np.float32))], path)
    assert not path.exists()


def test_every_head_is_a_heat_map_from_0_to_1_with_words_on_both_axes():
    pytest.importorskip("matplotlib")
    from attention_client._commands.heat_maps import HeatMaps, draw  # noqa: PLC0415 - needs matplotlib

    heads = range(2, 7)
    weights = np.random.default_rng(0).dirichlet(np.ones(3), (5, 3)).astype(np.float32)
    drawn = draw(HeatMaps(weights=weights, heads=heads, labels=WORDS, title="m"))
    drawn.draw_without_rendering()
    panels = [axes for axes in drawn.axes if axes.images]
    assert [panel.get_title() for panel in panels] == [f"head {head}" for head in heads]
    for panel, expected in zip(panels, weights, strict=True):
        (image,) = panel.images
        np.testing.assert_array_equal(image.get_array(), expected)
        assert image.get_clim() == (0.0, 1.0)
        for axis in (panel.xaxis, panel.yaxis):
            shown = axis.get_major_formatter().format_ticks(axis.get_majorticklocs())
            assert [word.replace("\\$", "$") for word in shown] == WORDS
        assert [text.get_text() for text in panel.texts] == [f"{each:.2f}" for each in expected.flat]
    small = draw(HeatMaps(weights=np.ones((1, 30, 30)), heads=[0], labels=["w"] * 30, title="m"))
    assert not small.axes[0].texts  # numbers do not fit into the cells

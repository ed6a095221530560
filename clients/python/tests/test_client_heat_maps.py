"""What a picture of attention weights holds; changes with how it looks."""

import subprocess
import sys

import numpy as np
import pytest

pytest.importorskip("matplotlib")

from attention_client._heat_maps import HeatMaps, draw

WORDS = ["eat", "dessert", "first"]


def figure(heads: int, words: list[str]):
    weights = np.random.default_rng(0).dirichlet(np.ones(len(words)), (heads, len(words)))
    maps = HeatMaps(
        weights=weights.astype(np.float32), heads=range(2, 2 + heads), labels=words, title="m, version 3"
    )
    return draw(maps), weights


@pytest.mark.parametrize("heads", [1, 2, 3, 4, 12])
def test_every_head_is_a_heat_map_from_0_to_1_with_words_on_both_axes(heads: int):
    drawn, weights = figure(heads, WORDS)
    panels = [axes for axes in drawn.axes if axes.images]
    assert [panel.get_title() for panel in panels] == [f"head {head}" for head in range(2, 2 + heads)]
    for panel, expected in zip(panels, weights, strict=True):
        (image,) = panel.images
        np.testing.assert_allclose(image.get_array(), expected, rtol=1e-6)
        assert image.get_clim() == (0.0, 1.0)
        for axis in (panel.xaxis, panel.yaxis):
            assert axis.get_major_formatter().format_ticks(axis.get_majorticklocs()) == WORDS
    assert drawn.get_suptitle() == "m, version 3"
    bars = [axes for axes in drawn.axes if axes.get_ylabel() == "attention weight"]
    assert len(bars) == 1


@pytest.mark.parametrize("heads", [1, 2, 3, 4, 5, 12])
def test_the_lowest_heat_map_of_every_column_shows_the_words_of_its_keys(heads: int):
    drawn, _ = figure(heads, WORDS)
    panels = [axes for axes in drawn.axes if axes.images]
    columns = panels[0].get_subplotspec().get_gridspec().ncols
    for index, panel in enumerate(panels):
        shown = panel.xaxis.get_tick_params()["labelbottom"]
        assert shown == (index + columns >= heads)


@pytest.mark.parametrize(("words", "shown"), [(3, True), (30, False)], ids=["few", "many"])
def test_numbers_stand_in_cells_that_can_hold_them(words: int, shown: bool):
    drawn, weights = figure(1, ["w"] * words)
    texts = [text.get_text() for text in drawn.axes[0].texts]
    assert texts == ([f"{weight:.2f}" for weight in weights.ravel().astype(np.float32)] if shown else [])


def test_a_word_with_dollar_signs_is_no_formula():
    drawn, _ = figure(1, ["$\\nonesuch$", "$", "b"])
    drawn.draw_without_rendering()


def test_no_global_state_of_pyplot_is_touched():
    code = "import sys, attention_client._heat_maps; sys.exit('matplotlib.pyplot' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=120).returncode == 0

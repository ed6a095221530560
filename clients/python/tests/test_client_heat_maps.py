"""Heat maps of attention weights."""

import numpy as np
import pytest

pytest.importorskip("matplotlib")

from attention_client._heat_maps import HeatMaps, draw

WORDS = ["eat", "$\\nonesuch$", "first"]  # a word with dollar signs is not a formula


@pytest.mark.parametrize("heads", [1, 5])
def test_every_head_is_a_heat_map_from_0_to_1_with_words_on_both_axes(heads: int):
    weights = np.random.default_rng(0).dirichlet(np.ones(3), (heads, 3)).astype(np.float32)
    drawn = draw(HeatMaps(weights=weights, heads=range(2, 2 + heads), labels=WORDS, title="m"))
    drawn.draw_without_rendering()
    panels = [axes for axes in drawn.axes if axes.images]
    columns = panels[0].get_subplotspec().get_gridspec().ncols
    assert [panel.get_title() for panel in panels] == [f"head {head}" for head in range(2, 2 + heads)]
    for index, (panel, expected) in enumerate(zip(panels, weights, strict=True)):
        (image,) = panel.images
        np.testing.assert_array_equal(image.get_array(), expected)
        assert image.get_clim() == (0.0, 1.0)
        for axis in (panel.xaxis, panel.yaxis):
            shown = axis.get_major_formatter().format_ticks(axis.get_majorticklocs())
            assert [word.replace("\\$", "$") for word in shown] == WORDS
        assert [text.get_text() for text in panel.texts] == [f"{each:.2f}" for each in expected.flat]
        assert panel.xaxis.get_tick_params()["labelbottom"] == (index + columns >= heads)


def test_cells_that_are_too_small_have_no_numbers():
    drawn = draw(HeatMaps(weights=np.ones((1, 30, 30)), heads=[0], labels=["w"] * 30, title="m"))
    assert not drawn.axes[0].texts

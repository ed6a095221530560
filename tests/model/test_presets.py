"""The named presets and their seeds."""

import pytest
import torch

from attention_serving.model.presets import PRESETS, SENTENCE, build_preset
from attention_serving.model.text import TextAttention
from tests.support.tables import TEXT

NAMES = sorted(PRESETS)
CONTRACT = {
    "sentence-self-attention",
    "self-attention",
    "cross-attention",
    "multi-head-768x12",
    "causal-768x12",
    "cross-768x12",
}


def test_the_presets_that_scripts_call_by_name_are_there() -> None:
    assert set(PRESETS) >= CONTRACT
    assert all(preset.name == name for name, preset in PRESETS.items())


@pytest.mark.parametrize("name", NAMES)
def test_a_preset_and_a_seed_always_give_the_same_weights(name: str) -> None:
    one, other = build_preset(name, seed=5).state_dict(), build_preset(name, seed=5).state_dict()
    torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize("name", NAMES)
def test_another_seed_gives_other_weights_everywhere(name: str) -> None:
    one, other = build_preset(name).state_dict(), build_preset(name, seed=1).state_dict()
    assert not any(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.parametrize("name", NAMES)
def test_a_preset_is_in_evaluation_mode(name: str) -> None:
    assert not any(module.training for module in build_preset(name).modules())


def test_building_a_preset_leaves_the_caller_s_random_numbers_alone() -> None:
    before = torch.get_rng_state()
    build_preset("self-attention", seed=9)
    assert torch.equal(torch.get_rng_state(), before)


def test_an_unknown_preset_is_refused_with_the_names_of_those_that_exist() -> None:
    with pytest.raises(KeyError) as refusal:
        build_preset("self-atention")
    assert "'self-atention'" in refusal.value.args[0]
    assert all(name in refusal.value.args[0] for name in NAMES)


def test_the_sentence_preset_reads_the_published_sentence() -> None:
    module = build_preset("sentence-self-attention")
    assert isinstance(module, TextAttention)
    assert module.tokenizer.encode(SENTENCE).ids == TEXT["token_ids"]

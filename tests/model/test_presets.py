"""The named presets and their seeds."""

import pytest
import torch

from attention_serving.model.presets import PRESETS, build_preset

CONTRACT = {
    "sentence-self-attention",
    "self-attention",
    "cross-attention",
    "multi-head-768x12",
    "causal-768x12",
    "rotary-768x12",
    "cross-768x12",
}


def test_the_presets_that_scripts_call_by_name_are_there() -> None:
    assert set(PRESETS) >= CONTRACT


@pytest.mark.parametrize("name", ["sentence-self-attention", "stacked-multi-head", "dropout-multi-head"])
def test_the_seed_alone_decides_the_weights(name: str) -> None:
    before = torch.get_rng_state()
    one, same, other = (build_preset(name, seed=seed) for seed in (5, 5, 6))
    assert torch.equal(torch.get_rng_state(), before)
    assert not any(module.training for module in one.modules())
    torch.testing.assert_close(one.state_dict(), same.state_dict(), rtol=0, atol=0)
    assert not any(torch.equal(value, other.state_dict()[key]) for key, value in one.state_dict().items())


def test_an_unknown_preset_is_refused_with_the_names_of_those_that_exist() -> None:
    with pytest.raises(KeyError) as refusal:
        build_preset("self-atention")
    assert "'self-atention'" in refusal.value.args[0]
    assert all(name in refusal.value.args[0] for name in PRESETS)

"""RemoteAttention in place of torch.nn.MultiheadAttention: the same call and result, from a live server."""

import copy
import logging
import math
import pickle
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from attention_client import AttentionClient, InvalidArgumentError, NotFoundError, UnavailableError
from attention_client.torch import RemoteAttention, may_attend
from safetensors.torch import save_file
from torch import Tensor, nn

from attention_serving.artifact.names import ModelId
from attention_serving.export.artifact import write_artifact
from attention_serving.model.checkpoints.loading import load_checkpoint
from scripts.local_server import ServerProcess, serving

WIDTH, HEADS = 12, 3
SELF, CROSS, MEMORY = "layer-self", "layer-three-widths", "layer-memory"
OPTIONS: dict[str, dict[str, Any]] = {SELF: {}, CROSS: {"kdim": 8, "vdim": 5}, MEMORY: {"kdim": 8, "vdim": 8}}
# A port on which nothing listens.
NOWHERE = "127.0.0.1:9"
ONCE: dict[str, Any] = {"max_retries": 0, "wait_for_ready": False, "timeout": 5.0}
thorough = pytest.mark.thorough


def layer(name: str, *, batch_first: bool = True) -> nn.MultiheadAttention:
    """The layer that the server has, always with the same weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        module = nn.MultiheadAttention(WIDTH, HEADS, batch_first=batch_first, **OPTIONS[name])
        for parameter in module.parameters():
            nn.init.normal_(parameter, std=0.4)
    return module.eval()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("layers")
    for name in OPTIONS:
        path = folder / f"{name}.safetensors"
        save_file(layer(name).state_dict(), path)
        module = load_checkpoint(path, layout="torch", heads=HEADS).module
        write_artifact(module, ModelId(name), folder / "models")
    with serving(folder / "models", folder / "log", "--threads=1") as process:
        yield process


def tensors(name: str, batch: tuple[int, ...], query: int, key: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(query * 100 + key)
    rows = torch.randn(*batch, query, WIDTH, generator=generator)
    if name == SELF:
        return rows, rows, rows
    keys, values = (torch.randn(*batch, key, width, generator=generator) for width in OPTIONS[name].values())
    return rows, keys, values


same = partial(torch.testing.assert_close, rtol=1.3e-6, atol=1e-5)  # weights may be None in both


def masks(batch: tuple[int, ...], query: int, key: int) -> list[dict[str, Tensor]]:
    """Masks that leave the first key to every row, so that PyTorch's result has no NaN."""
    generator = torch.Generator().manual_seed(query + key)
    padding = torch.rand(*batch, key, generator=generator) < 0.4
    pairs = torch.rand(query, key, generator=generator) < 0.4
    heads = torch.rand(math.prod(batch) * HEADS, query, key, generator=generator) < 0.4
    for mask in (padding, pairs, heads):
        mask[..., 0] = False
    return [
        {},
        {"key_padding_mask": padding},
        {"attn_mask": torch.zeros(query, key).masked_fill(pairs, float("-inf"))},
        {"attn_mask": heads},
        {"attn_mask": heads, "key_padding_mask": padding},
    ]


@thorough
@pytest.mark.parametrize(
    ("batch", "batch_first"),
    [((2,), True), ((2,), False), ((), False)],
    ids=["batch first", "batch second", "one sequence"],
)
@pytest.mark.parametrize("name", [SELF, CROSS])
@torch.inference_mode()
def test_every_mask_gives_the_result_of_the_layer(
    server: ServerProcess, name: str, batch: tuple[int, ...], *, batch_first: bool
) -> None:
    module = RemoteAttention(server.target, name, batch_first=batch_first)
    local = layer(name, batch_first=batch_first)
    lengths = (5, 5 if name == SELF else 7)
    inputs: tuple[Tensor, ...] = tensors(name, batch, *lengths)
    if batch and not batch_first:
        transposed = {id(tensor): tensor.transpose(0, 1) for tensor in inputs}
        inputs = tuple(transposed[id(tensor)] for tensor in inputs)
    for mask in masks(batch, *lengths):
        for options in ({}, {"average_attn_weights": False}, {"need_weights": False}):
            same(module(*inputs, **options, **mask), local(*inputs, **options, **mask))
    module.close()


@thorough
@torch.inference_mode()
def test_a_row_that_may_attend_to_nothing_has_weights_of_zero_and_copies_connect_by_themselves(
    server: ServerProcess,
) -> None:
    remote = RemoteAttention(server.target, SELF, batch_first=True)
    query = tensors(SELF, (1,), 3, 3)[0]
    blocked = torch.zeros(3, 3, dtype=torch.bool)
    blocked[1] = True
    context, weights = remote(query, query, query, attn_mask=blocked)
    assert weights is not None
    assert not weights[0, 1].any()
    torch.testing.assert_close(context[0, 1], layer(SELF).out_proj.bias)
    for each in (copy.deepcopy(remote), pickle.loads(pickle.dumps(remote)), remote):  # noqa: S301 - of this test
        same(each(query, query, query, attn_mask=blocked), (context, weights))
        each.close()


@thorough
@torch.inference_mode()
@pytest.mark.parametrize(
    "shape", [(7, 8), (7, 1, 8), (7, 2, 8)], ids=["alone", "batch of one", "batch of two"]
)
def test_a_memory_is_stored_until_its_numbers_change(server: ServerProcess, shape: tuple[int, ...]) -> None:
    local, stored = layer(MEMORY, batch_first=False), 1 if shape[1] != 2 else 0
    remote = RemoteAttention(server.target, MEMORY, store_memory=True)
    memory = torch.randn(*shape, generator=torch.Generator().manual_seed(math.prod(shape)))
    with AttentionClient(server.target) as client:
        for each in client.contexts(MEMORY):
            each.drop()
        for changes in (0, 1):
            memory += changes
            for tokens in (1, 3):
                query = torch.ones(tokens, *shape[1:-1], WIDTH)
                padding = torch.zeros(*shape[1:-1], 7, dtype=torch.bool)
                padding[..., -2:] = True
                for mask in (None, padding):
                    same(remote(query, memory, memory, mask), local(query, memory, memory, mask))
            assert len(client.contexts(MEMORY)) == stored * (changes + 1)
    same(copy.deepcopy(remote)(query, memory, memory), local(query, memory, memory))
    remote.close()
    same(remote(query, memory, memory), local(query, memory, memory))


@thorough
@torch.inference_mode()
def test_mistakes_are_refused_and_not_hidden_by_the_fallback(server: ServerProcess) -> None:
    query = tensors(SELF, (1,), 3, 3)[0]
    options: dict[str, Any] = {"batch_first": True, "fallback": layer(SELF)}
    with pytest.raises(InvalidArgumentError):
        RemoteAttention(server.target, SELF, **options)(query, torch.ones(1, 3, WIDTH), query)
    with pytest.raises(NotFoundError):
        RemoteAttention(server.target, "absent", **options)(query, query, query)


def test_wrong_masks_are_refused_by_name() -> None:
    rows = torch.ones(1, 3, WIDTH)
    assert may_attend(rows, rows, None, None) is None
    with pytest.raises(InvalidArgumentError) as refused:
        may_attend(rows, rows, torch.zeros(1, 4, dtype=torch.bool), None)
    assert refused.value.field == "key_padding_mask"
    for mask in (torch.full((3, 3), -1e4), torch.zeros(2, 3, 4)):
        with pytest.raises(InvalidArgumentError) as refused:
            may_attend(rows, rows, None, mask)
        assert refused.value.field == "attn_mask"


@torch.inference_mode()
def test_the_fallback_answers_when_the_service_does_not(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    query, local = tensors(SELF, (2,), 3, 3)[0], layer(SELF)
    module = RemoteAttention(NOWHERE, SELF, batch_first=True, fallback=local, **ONCE)
    same(module(query, query, query), local(query, query, query))
    assert "computed by the fallback instead" in caplog.text
    alone = RemoteAttention(NOWHERE, SELF, batch_first=True, **ONCE)
    with pytest.raises(UnavailableError):
        alone(query, query, query)
    with pytest.raises(InvalidArgumentError, match="2-D or all 3-D") as refused:
        module(torch.ones(WIDTH), query, query)
    assert refused.value.field == "query"
    with pytest.raises(InvalidArgumentError, match="batch_first=False"):
        RemoteAttention(NOWHERE, SELF, fallback=local)


def test_gradients_need_a_fallback() -> None:
    query = tensors(SELF, (1,), 3, 3)[0].requires_grad_()
    with pytest.raises(RuntimeError, match=r"no gradients.*fallback"):
        RemoteAttention(NOWHERE, SELF, batch_first=True)(query, query, query)
    trained = RemoteAttention(NOWHERE, SELF, batch_first=True, fallback=layer(SELF))
    trained(query, query, query)[0].sum().backward()
    assert query.grad is not None

"""What is exported is a copy without wrappers, in float32; which axes vary is found."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attention_serving.export import ExportError
from attention_serving.export.axes import understand
from attention_serving.export.module import read_inputs
from attention_serving.export.signature import named_outputs
from attention_serving.export.source import copy_module, name_inputs
from attention_serving.model.presets import build_preset

ROWS = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(1))


class Block(nn.Module):
    """Attends to itself."""

    def __init__(self) -> None:
        super().__init__()
        self.projection = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.projection(x)
        return F.scaled_dot_product_attention(rows, rows, x)


class Variadic(nn.Module):
    """Passes what it is called with on."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.inner = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)


class Positional(nn.Module):
    """Takes inputs by position alone."""

    def forward(self, *args: Tensor) -> Tensor:
        return torch.cat([args[0], args[1].mean(1, keepdim=True)], 1)


def compile_module(module: nn.Module) -> nn.Module:
    compiled: Any = torch.compile(module, dynamic=True)
    return compiled  # type: ignore[no-any-return]


def weight_norm(module: nn.Module) -> nn.Module:
    nn.utils.weight_norm(module.get_submodule("projection"))
    return module


def peft(module: nn.Module) -> nn.Module:
    library = pytest.importorskip("peft")
    config = library.LoraConfig(target_modules=["projection"], r=2, init_lora_weights=False)
    adapted: nn.Module = library.get_peft_model(module, config)
    return adapted


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "torch.compile": compile_module,
    "torch.compile of a part": lambda module: nn.Sequential(compile_module(module)),
    "DataParallel": nn.DataParallel,
    "AveragedModel": torch.optim.swa_utils.AveragedModel,
    "PEFT": peft,
    "torch.jit.script": torch.jit.script,
    "torch.jit.trace": lambda module: torch.jit.trace(module, ROWS),  # type: ignore[no-untyped-call]
    "weight norm": weight_norm,
    "*args and **kwargs": Variadic,
}


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_a_wrapped_module_is_exported_as_what_it_computes_and_stays_as_it_is(
    wrap: Callable[[nn.Module], nn.Module],
) -> None:
    wrapped = wrap(Block()).train()
    before = {name: tensor.clone() for name, tensor in wrapped.state_dict().items()}
    module, _ = copy_module(wrapped, [ROWS])
    module.requires_grad_(requires_grad=False)
    others = torch.randn(3, 9, 8)
    with torch.compiler.set_stance("force_eager"):
        torch.testing.assert_close(module(others), wrapped(others).detach())
    for parameter in module.parameters():
        parameter.data.add_(1)
    assert wrapped.training
    assert not module.training
    assert all(torch.equal(wrapped.state_dict()[name], tensor) for name, tensor in before.items())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_weights_of_other_types_are_computed_in_float32_which_is_noted(dtype: torch.dtype) -> None:
    original = Block().to(dtype)
    original.table = torch.ones(8, dtype=dtype)
    module, inputs, notes = read_inputs(original, [ROWS.to(dtype)], None, None, None, None, ())
    assert {parameter.dtype for parameter in module.parameters()} == {module.table.dtype} == {torch.float32}
    assert notes == [f"weights in {dtype}: computed in torch.float32, in a copy"]
    assert [spec.data_type for spec in inputs.tensors] == ["float32"]
    assert original.projection.weight.dtype is original.table.dtype is dtype


REFUSALS: dict[str, tuple[Any, str]] = {
    "a function": (torch.relu, "the module is builtin_function.*; wrap it in a torch.nn.Module"),
    "weights that do not exist yet": (nn.LazyLinear(3), "call the module once"),
}


@pytest.mark.parametrize(("module", "message"), REFUSALS.values(), ids=REFUSALS)
def test_what_cannot_be_copied_is_refused(module: Any, message: str) -> None:
    with pytest.raises(ExportError, match=message):
        copy_module(module, [ROWS])


def test_inputs_without_names_are_passed_by_position() -> None:
    module, inputs, _ = read_inputs(Positional(), [ROWS, ROWS], None, None, None, None, ())
    assert [spec.name for spec in inputs.tensors] == ["input_0", "input_1"]
    called = inputs.adapted(module)(input_1=ROWS * 2, input_0=ROWS)
    assert torch.equal(called, Positional()(ROWS, ROWS * 2))


@dataclass
class Scores:
    left: Tensor
    rest: Any


class Pair(NamedTuple):
    first: Tensor
    second: Tensor | None


class DynamicCache:
    """As that of transformers."""


OUTPUTS: dict[str, tuple[Any, list[str], list[str]]] = {
    "a tensor": (ROWS, [""], []),
    "a dataclass": ({"scores": Scores(ROWS, [ROWS, None])}, ["scores.left", "scores.rest.0"], []),
    "a named tuple": (Pair(ROWS, None), ["first"], []),
    "caches": (
        {"rows": ROWS, "past_key_values": ((ROWS, ROWS),), "memory": DynamicCache()},
        ["rows"],
        ["past_key_values", "memory"],
    ),
}


@pytest.mark.parametrize(("outputs", "names", "caches"), OUTPUTS.values(), ids=OUTPUTS)
def test_outputs_are_named_by_their_path(outputs: Any, names: list[str], caches: list[str]) -> None:
    tensors, omitted = named_outputs(outputs)
    assert ([*tensors], omitted) == (names, caches)


class Reads(nn.Module):
    """Reads ids in embeddings of 40 and 7 rows, and from 1 on in one of 21."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.kinds, self.items = nn.Embedding(40, 8), nn.Embedding(7, 8), nn.Embedding(21, 8)

    def forward(self, words: Tensor, kinds: Tensor, items: Tensor) -> Tensor:
        return torch.stack([self.words(words), self.kinds(kinds), self.items(items + 1)]).sum(0)


class Masked(nn.Module):
    """Attends from one sequence to another, whose padding a mask marks."""

    def __init__(self, *, batch_first: bool = True, flag: bool = True) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=batch_first)
        self.hides = flag

    def forward(self, query: Tensor, memory: Tensor, **masks: Tensor) -> Any:
        (mask,) = masks.values()
        mask = mask if self.hides else ~mask
        return self.attention(query, memory, memory, key_padding_mask=mask, need_weights=False)[0]


def attend_to_first(query: Tensor, memory: Tensor, memory_len: Tensor) -> Tensor:
    """Attends to as many keys as the lengths say."""
    hidden = torch.arange(memory.shape[1]) >= memory_len[:, None]
    scores = (query @ memory.mT).masked_fill(hidden[:, None], -torch.inf)
    return scores.softmax(-1) @ memory


def cut_to_longest(x: Tensor, x_lengths: Tensor) -> Tensor:
    """Sums what comes before each row, as long as the longest sequence."""
    kept = torch.arange(x.shape[1]) < x_lengths[:, None]
    return (x.cumsum(1) * kept[..., None])[:, : int(x_lengths.max())]


class Changes(nn.Module):
    """Computes a function."""

    def __init__(self, change: Callable[..., Any]) -> None:
        super().__init__()
        self.change = change

    def forward(self, *args: Tensor, **kwargs: Tensor) -> Any:
        return self.change(*args, **kwargs)


def cross(name: str) -> dict[str, Tensor]:
    """An example in which all sizes coincide."""
    return {"query": torch.randn(3, 3, 8), "memory": torch.randn(3, 3, 8), name: torch.zeros(3, 3).bool()}


BATCH, IDS = {0: "batch"}, torch.zeros(2, 5, dtype=torch.int64)
SEQUENCE = BATCH | {1: "sequence"}
QUERY, MEMORY = BATCH | {1: "query_length"}, BATCH | {1: "memory_length"}
AXES: dict[str, tuple[nn.Module, Mapping[str, Tensor], dict[str, dict[int, str]], dict[str, Any]]] = {
    "one sequence": (Block(), {"x": ROWS}, {"x": SEQUENCE}, {}),
    "one row": (Block(), {"x": ROWS[:, :1]}, {"x": SEQUENCE}, {}),
    "columns": (nn.Linear(8, 3), {"input": ROWS[:, 0]}, {"input": BATCH}, {}),
    "numbers": (Changes(lambda x: x * 2), {"x": ROWS[:, 0, 0]}, {"x": BATCH},
                {"output_names": ["scores"]}),
    "images": (nn.Conv2d(3, 4, 2), {"input": torch.randn(2, 3, 8, 8)}, {"input": BATCH}, {}),
    "sizes that coincide": (
        Masked(), cross("padding_mask"),
        {"query": QUERY, "memory": MEMORY, "padding_mask": MEMORY}, {"masks": {"padding_mask": "True hides"}},
    ),
    "a flag": (
        Masked(flag=False), cross("valid"),
        {"query": QUERY, "memory": MEMORY, "valid": MEMORY},
        {"flags": ["input valid: an ordinary input; masks={'valid': 'True attends'}, or --mask "
                   "'valid=True attends', makes it a mask ('True attends' was found to hide rows)"]},
    ),
    "lengths": (
        Changes(attend_to_first), {"query": ROWS, "memory": ROWS, "memory_len": torch.tensor([5, 3])},
        {"query": QUERY, "memory": MEMORY, "memory_len": BATCH},
        {"masks": {"memory_len": "lengths of memory_length"}},
    ),
    "lengths of a causal module": (
        build_preset("causal-self-attention"),
        {"query": torch.randn(2, 5, 16), "key_lengths": torch.tensor([5, 3])},
        {"query": SEQUENCE, "key_lengths": BATCH}, {"masks": {"key_lengths": "lengths of sequence"}},
    ),
    "lengths that outputs are cut to": (
        Changes(cut_to_longest), {"x": ROWS, "x_lengths": torch.tensor([5, 3])},
        {"x": SEQUENCE, "x_lengths": BATCH}, {"masks": {"x_lengths": "lengths of sequence"}},
    ),
    "the batch second": (
        Masked(batch_first=False),
        {"query": torch.randn(5, 2, 8), "memory": ROWS.transpose(0, 1)[:4],
         "padding_mask": torch.zeros(2, 4).bool()},
        {"query": {0: "query_length", 1: "batch"}, "memory": {0: "memory_length", 1: "batch"},
         "padding_mask": MEMORY},
        {"output_axes": (1,), "masks": {"padding_mask": "True hides"}},
    ),
    "ids": (
        Reads(), {"words": IDS, "kinds": IDS, "items": IDS},
        dict.fromkeys(["words", "kinds", "items"], SEQUENCE),
        {"id_bounds": {"words": 40, "kinds": 7, "items": 20}},
    ),
    "columns that are not read": (Changes(lambda x: x[:, :3] @ torch.ones(3, 2)), {"x": ROWS[:, 0, :3]},
                                  {"x": BATCH}, {}),
}  # fmt: skip


@pytest.mark.parametrize(("module", "examples", "axes", "others"), AXES.values(), ids=AXES)
def test_the_axes_that_vary_are_found_and_what_was_found_can_be_given(
    module: nn.Module, examples: Mapping[str, Tensor], axes: dict[str, Any], others: dict[str, Any]
) -> None:
    values: Mapping[str, Sequence[Tensor]] = {name: [tensor] for name, tensor in examples.items()}
    result = understand(module.eval(), values, {}, {}, positional=False)
    assert result.axes == axes
    assert {name: getattr(result, name) for name in others} == others
    assert f"dynamic_axes={axes}" in str(result)
    again = understand(module, values, result.axes, result.masks, positional=False)
    assert (again.axes, again.masks, again.output_axes) == (result.axes, result.masks, result.output_axes)


def test_a_second_example_tells_axes_of_one_size_apart() -> None:
    module = Changes(lambda x, y: x.mean(1) + y.mean(1))
    first, second = [ROWS, ROWS], [ROWS, ROWS[:, :2]]
    values = dict(zip(("x", "y"), map(list, zip(first, second, strict=True)), strict=True))
    result = understand(module, values, {"x": SEQUENCE}, {}, positional=False)
    assert result.axes == {"x": SEQUENCE, "y": BATCH | {1: "y_length"}}


def test_names_are_those_of_forward() -> None:
    assert [*name_inputs(Masked(), {"mask": ROWS, "memory": ROWS, "query": ROWS})] == [
        "query",
        "memory",
        "mask",
    ]

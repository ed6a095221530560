"""`export_module`: how masks and lengths are read, and modules and arguments that are refused with advice."""

import json
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attention_serving.artifact.certificate import check_certificate
from attention_serving.artifact.golden import load_golden
from attention_serving.artifact.keys import read_public_keys
from attention_serving.artifact.manifest import GraphKind, Manifest
from attention_serving.export import ExportError, export_module
from attention_serving.export.module import ModuleInputs, find_max_lengths
from tests.support.keys import new_key, write_keys

ROWS = {"x": torch.zeros(2, 3, 8)}
ROW_AXES = {0: "batch", 1: "sequence"}
HIDES = ROWS | {"key_padding_mask": torch.zeros(2, 3, dtype=torch.bool)}
MASK = ROWS | {"attention_mask": torch.ones(2, 3, dtype=torch.bool)}
IDS = ROWS | {"ids": torch.zeros(2, 5, dtype=torch.int64)}


def export(
    module: nn.Module, examples: Mapping[str, Any], out: Path, /, **options: Any
) -> tuple[Path, Manifest]:
    axes = dict.fromkeys(examples, ROW_AXES)
    given = {"example_inputs": examples, "dynamic_axes": axes, "name": "module"} | options
    return export_module(module, out=out, **given)


class Hides(nn.Module):
    """Its mask means the opposite of what its name says."""

    def forward(self, x: Tensor, key_padding_mask: Tensor) -> Tensor:
        mask = key_padding_mask[:, None, :].expand(-1, x.shape[1], -1)
        return F.scaled_dot_product_attention(x, x, x, attn_mask=mask)


class ReadsPadding(nn.Module):
    """Masks the keys of attention, and then computes a mean of all rows."""

    def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
        return x - x.mean(dim=1, keepdim=True) + attention_mask[..., None].float()


class Windowed(nn.Module):
    """Rows attend to the 600 rows before them."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 8, batch_first=True), 1)

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.arange(x.shape[1])
        distance = rows[:, None] - rows
        mask = torch.zeros(distance.shape).masked_fill((distance < 0) | (distance >= 600), float("-inf"))
        encoded: Tensor = self.encoder(x, mask=mask)
        return encoded


class Dilated(nn.Module):
    """Hides keys, and then combines rows that are four rows apart."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.layer = nn.Conv1d(8, 8, 3, padding=4, dilation=4)

    def forward(self, x: Tensor, key_padding_mask: Tensor) -> Tensor:
        context = self.attention(x, x, x, key_padding_mask=key_padding_mask, need_weights=False)[0]
        combined: Tensor = self.layer(context.transpose(1, 2))
        return combined.transpose(1, 2)


class Positioned(nn.Module):
    """Adds a row of a table to each row, as models with learnt positions do."""

    def __init__(self, rows: int, **config: int) -> None:
        super().__init__()
        self.table = nn.Embedding(rows, 8)
        if config:
            self.config = SimpleNamespace(**config)

    def forward(self, x: Tensor) -> Tensor:
        positions: Tensor = self.table(torch.arange(x.shape[1]))
        return x + positions


class Takes(nn.Module):
    """Takes what a test gives, and returns what a test makes of its rows."""

    def __init__(self, change: Callable[[Tensor], Any] = lambda rows: rows) -> None:
        super().__init__()
        self.change = change

    def forward(
        self, x: Tensor, ids: Any = None, attn_mask: Any = None, attention_mask: Any = None,
        key_padding_mask: Any = None, shown: Any = None, positions: Any = None, text: Any = None,
    ) -> Any:  # fmt: skip
        del ids, attn_mask, attention_mask, key_padding_mask, shown, positions, text
        return self.change(x)


MODULES: dict[str, tuple[nn.Module, Mapping[str, Tensor], str]] = {
    "random": (Takes(F.dropout), ROWS, "two runs on the same inputs differ; .* training=self.training"),
    "mixes the batch": (
        Takes(lambda x: x - x.mean(dim=(0, 1), keepdim=True)),
        ROWS,
        "come from different callers and must not depend on each other.*0: 'sequence'",
    ),
    "branches on data": (
        Takes(lambda x: x if x.sum() > 0 else -x),
        ROWS,
        r"the module branches on the values of its inputs, at .*test_module.py:\d+: .*if x.sum\(\) > 0",
    ),
    # A graph for lengths up to 8 would give wrong results for longer ones.
    "branches on a length": (
        Takes(lambda x: x if x.shape[1] <= 8 else x * 2),
        ROWS,
        r"branches on a size, or fixes it, at .*py:\d+: .*x.shape\[1\] <= 8.*9 of sequence .*max_length=8",
    ),
    "branches on a remainder": (
        Takes(lambda x: x * 2 if x.shape[1] % 10 == 0 and x.shape[1] > 700 else x),
        ROWS,
        r"branches on a size, or fixes it, at .*test_module.py:\d+: .*for 1030 of sequence",
    ),
    "branches on the batch": (
        Takes(lambda x: x * 2 if x.shape[0] > 4 else x),
        ROWS,
        r"branches on a size, or fixes it, at .*test_module.py:\d+: .*for 5 of batch",
    ),
    # PyTorch compares the mask with the causal one, which is the same for up to 600 rows.
    "branches on a mask of its own": (
        Windowed(),
        ROWS,
        r"branches on the values of a tensor, at .*transformer.py:\d+: .*pass is_causal=False",
    ),
    "padding seen far away": (
        Dilated(),
        HIDES,
        "depends on rows that key_padding_mask hides",
    ),
    "no number": (Takes(torch.log), {"x": torch.randn(2, 3, 8)}, "returns NaN for finite inputs"),
    "an unknown operator": (Takes(torch.special.bessel_j0), ROWS, "has no ONNX form of .*bessel_j0"),
    "fails": (
        Takes(lambda x: x @ x),
        ROWS,
        r"^the module fails for x \[2, 3, 8\], at .*test_module.py:\d+: .*x @ x.*: RuntimeError: ",
    ),
    "the opposite mask": (
        Hides(),
        HIDES,
        "on rows that key_padding_mask hides. .* state .*: 'True attends'}",
    ),
    "reads padding": (ReadsPadding(), MASK, "otherwise mask these rows everywhere, or pass masks"),
    "returns a number": (
        Takes(lambda x: {"rows": x, "counts": [x.shape[1]]}),
        ROWS,
        "returns int; outputs must be tensors",
    ),
}


@pytest.mark.parametrize(("module", "examples", "says"), MODULES.values(), ids=MODULES)
def test_a_module_that_cannot_be_served_is_told_what_it_does_and_what_to_change(
    module: nn.Module,
    examples: Mapping[str, Tensor],
    says: str,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(ExportError, match=says) as refusal:
        export(module, examples, tmp_path)
    message, _, details = str(refusal.value).partition("\n  details: ")
    assert len(message) < 500
    assert "\n" not in message
    assert "wider tolerance" not in message
    shown = "".join(traceback.format_exception(refusal.value))
    assert (shown.count("Traceback"), shown.count("\n") < 30) == (1, True)
    if details:
        assert Path(details).read_text()
        Path(details).unlink()
    captured = capfd.readouterr()
    assert captured.out + captured.err == ""
    assert not list(tmp_path.iterdir())


def axes(**named: dict[int, str]) -> dict[str, Any]:
    return {"dynamic_axes": {"x": ROW_AXES} | named}


def returning(change: Callable[[Tensor], Any], **options: Any) -> dict[str, Any]:
    return {"module": Takes(change), **options}


class Joins(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.cat([x, y], 1)


SQUARE = ROWS | {"attn_mask": torch.zeros(2, 3, 3, dtype=torch.bool)}
ARGUMENTS: dict[str, tuple[Mapping[str, Any], dict[str, Any], str]] = {
    "axis 0 of another name": (
        ROWS,
        axes(x={0: "sequences", 1: "sequence"}),
        r"dynamic_axes\['x'\]=.*: name axis 0 'batch' and axis 1",
    ),
    "no mapping": (ROWS, {"dynamic_axes": {"x": [0, 1]}}, "must be a mapping such as {0: 'batch', 1"),
    "no batch": (
        ROWS | {"shown": torch.ones(5, 4)},
        {"dynamic_axes": None},
        r"x \(2, 3, 8\), shown \(5, 4\) have no common batch axis",
    ),
    "axes of no input": (ROWS, axes(other=ROW_AXES), "not an input; the inputs are x"),
    "mask of another axis": (
        MASK,
        axes(attention_mask={0: "batch", 1: "keys"}),
        "no other input has the axis 'keys'; they have sequence",
    ),
    "int32": ({"x": ROWS["x"].int()}, {}, "is torch.int32; an input is one of float32, int64, bool"),
    "no tensor": (ROWS | {"ids": False}, {}, r"example_inputs\['ids'\] is bool, not a tensor: wrap"),
    "unknown input": (ROWS | {"other": ROWS["x"]}, {}, r"example_inputs=\['x', 'other'\]: forward takes x"),
    "no ids": (ROWS | {"ids": torch.full((2, 3), -1)}, {}, "give at least one id, and none below 0"),
    "output names": (ROWS, {"output_names": ["a", "b"]}, r"1 outputs, of shapes \[2, 3, 8\]; name"),
    "axis of no input": (
        ROWS,
        returning(lambda x: x.new_ones(len(x), x.shape[1] ** 2)),
        "axis 1 has the sizes 9, 289, 1, .* does not follow from one sequence axis alone",
    ),
    "axis of two inputs": (
        ROWS | {"y": torch.zeros(2, 3, 8)},
        {"dynamic_axes": {"x": ROW_AXES, "y": {0: "batch", 1: "other"}}, "module": Joins()},
        "does not follow from one sequence axis alone",
    ),
    "rows of a window": (ROWS, returning(lambda x: x[:, -2:]), "axis 1 has the sizes 2, 2, 1, 2"),
    "axis 2 varies": (
        ROWS,
        axes(x=ROW_AXES | {2: "width"}),
        "axis 2 varies. Only axis 0, the batch, and axis 1",
    ),
    "output without batch": (ROWS, returning(lambda x: x.mean(0)), "must begin with the batch axis"),
    "a reserved name": (ROWS | {"text": ROWS["x"]}, {}, r"meaning of its own .* inputs={'text': 'my_text'}"),
    "a name twice": (IDS, {"inputs": {"ids": "x"}, **axes(ids=ROW_AXES)}, "must be unique and match"),
    "a mask not stated": (SQUARE, axes(attn_mask=ROW_AXES | {2: "sequence"}), "is a mask; state what"),
    "a mask of unknown meaning": (MASK, {"masks": {"attention_mask": "hides"}}, "must be None, .True hides"),
    "one row": (ROWS, {"max_length": 1}, "max_length=1 of axis 'sequence': must be an integer of at least 2"),
}


@pytest.mark.parametrize(("examples", "options", "says"), ARGUMENTS.values(), ids=ARGUMENTS)
def test_arguments_that_do_not_fit_are_refused_before_anything_is_written(
    examples: Mapping[str, Any], options: dict[str, Any], says: str, tmp_path: Path
) -> None:
    options = dict(options)
    with pytest.raises(ValueError, match=says):
        export(options.pop("module", Takes()), examples, tmp_path, **options)
    assert not list(tmp_path.iterdir())


class Pairs(nn.Module):
    """Attends to itself with a mask of query and key rows, as scaled_dot_product_attention reads it."""

    def __init__(self, *, inverted: bool) -> None:
        super().__init__()
        self.inverted = inverted

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        for _ in range(2):
            allowed = ~mask if self.inverted else mask
            x = (x + F.scaled_dot_product_attention(x, x, x, attn_mask=allowed)) / 2
        return x


@pytest.mark.parametrize("right", ["True attends", "True hides"])
def test_a_mask_of_pairs_with_the_opposite_meaning_is_refused(right: str, tmp_path: Path) -> None:
    examples = ROWS | {"mask": torch.ones(2, 3, 3, dtype=torch.bool)}
    stated = "True hides" if right == "True attends" else "True attends"
    options = {"masks": {"mask": stated}, **axes(mask=ROW_AXES | {2: "sequence"})}
    with pytest.raises(
        ExportError, match=f"depends on rows that mask hides. .*state masks={{'mask': '{right}'}}"
    ):
        export(Pairs(inverted=right == "True hides"), examples, tmp_path, **options)


MEANINGS = [
    ("attention_mask", torch.int64, "True attends"),
    ("attention_mask", torch.float32, "True attends"),
    ("key_padding_mask", torch.bool, "True hides"),
    ("key_padding_mask", torch.float32, "added"),
    ("shown", torch.bool, None),
]


@pytest.mark.parametrize(("name", "dtype", "meaning"), MEANINGS)
def test_a_mask_means_what_its_name_and_type_say(name: str, dtype: torch.dtype, meaning: str | None) -> None:
    examples = ROWS | {name: torch.ones(2, 3, dtype=dtype)}
    inputs = ModuleInputs.of(Takes(), examples, dict.fromkeys(examples, ROW_AXES), None)
    assert [mask.meaning for mask in inputs.masks] == ([] if meaning is None else [meaning])
    assert [spec.name for spec in inputs.tensors] == (["x"] if meaning else ["x", name])


def test_a_mask_that_the_caller_declines_is_an_input_of_another_name(tmp_path: Path) -> None:
    renamed = {"masks": {"attention_mask": None}, "inputs": {"attention_mask": "shown"}}
    _, manifest = export(ReadsPadding(), MASK, tmp_path, **renamed)
    assert {kind: [spec.name for spec in graph.inputs] for kind, graph in manifest.graphs.items()} == {
        GraphKind.PLAIN: ["x", "shown"]
    }


BOUNDS: dict[str, tuple[nn.Module, dict[str, int], dict[str, int]]] = {
    "a branch": (Takes(lambda x: x * 2 if x.shape[1] > 1024 else x), {}, {"sequence": 1024}),
    "a table": (Positioned(700), {}, {"sequence": 700}),
    "a configuration": (Positioned(700, max_position_embeddings=40), {}, {"sequence": 40}),
    "a convolution": (
        Takes(lambda x: F.avg_pool1d(x.transpose(1, 2), 5, 1).sum(2)), {"sequence": 5}, {"sequence": 8192}
    ),
    "nothing": (Takes(lambda x: x + x.mean(1, keepdim=True)), {}, {"sequence": 8192}),
}  # fmt: skip


@pytest.mark.parametrize(("module", "least", "largest"), BOUNDS.values(), ids=BOUNDS)
def test_lengths_at_which_a_module_fails_or_computes_something_else_are_excluded(
    module: nn.Module, least: dict[str, int], largest: dict[str, int], tmp_path: Path
) -> None:
    folder, manifest = export(module, ROWS, tmp_path)
    assert (manifest.min_lengths, manifest.max_lengths) == (least, largest)
    report = json.loads((folder / manifest.parity_report).read_bytes())
    sizes = [case["sizes"]["sequence"] for case in report["cases"]]
    assert max(sizes) <= largest["sequence"]
    assert min(sizes) == least.get("sequence", 1)


def test_a_branch_on_values_is_followed_if_the_caller_says_so_which_all_records_repeat(
    tmp_path: Path,
) -> None:
    private, public = write_keys(tmp_path, new_key())
    module, repository = Takes(lambda x: x / 255 if x.abs().max() > 10 else x), tmp_path / "repository"
    folder, manifest = export(module, ROWS, repository, branches="as traced", sign_key=private)
    assert [line.split(":")[0] for line in manifest.branches_as_traced] == ["test_module.py"]
    report = json.loads((folder / manifest.parity_report).read_bytes())
    proof = check_certificate(folder, manifest, read_public_keys(public)).proof
    assert report["branches_as_traced"] == [*proof.branches_as_traced] == [*manifest.branches_as_traced]
    with pytest.raises(ValueError, match="branches='yes': must be None or 'as traced'"):
        export(module, ROWS, tmp_path, branches="yes")


@pytest.mark.parametrize(
    "values", [torch.ones_like, lambda x: torch.zeros(x.shape), lambda x: x.new_full(x.shape, 3)]
)
def test_a_branch_that_no_value_of_an_input_decides_is_followed(values: Any, tmp_path: Path) -> None:
    def change(x: Tensor) -> Tensor:
        return x * 2 if values(x).sum() > 1 else x

    _, manifest = export(Takes(change), ROWS, tmp_path)
    assert manifest.branches_as_traced == ()


def test_values_are_those_of_the_examples(tmp_path: Path) -> None:
    """In eager PyTorch, a logarithm of numbers below zero is NaN. The second example widens the range."""
    gaps = torch.rand(2, 3, 8) + 0.5
    folder, manifest = export(Takes(torch.log), {"x": gaps}, tmp_path, examples=[{"x": gaps * 100}])
    values = np.concatenate([case.inputs["x"].ravel() for case in load_golden(folder / manifest.golden)])
    assert 0 < values.min() < 2  # of the first example
    assert 32 < values.max() <= 256
    other = Takes(lambda x: (x * 1000).sum(1))
    _, manifest = export(other, {"x": gaps * 100}, tmp_path, replace=True)
    assert manifest.tolerance.atol > 1e-3
    with pytest.raises(ValueError, match=r"examples\[0\]\['x'\]: differs from example_inputs in type"):
        export(other, {"x": gaps}, tmp_path, examples=[{"x": gaps[..., :4]}])


def test_what_pytorchs_fused_layers_return_is_stated_if_it_differs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 1).eval()
    module = Takes(lambda x: encoder(x, src_key_padding_mask=x[..., 0] == 0))
    folder, manifest = export(module, ROWS, tmp_path)
    (note,) = json.loads((folder / manifest.parity_report).read_bytes())["notes"]
    assert "fused kernels" in note
    assert note in caplog.text


def test_the_largest_length_is_that_of_the_caller_or_of_the_configuration() -> None:
    module = Positioned(9, n_positions=9)
    assert find_max_lengths(module, ["rows", "ids"], None) == {"rows": 9, "ids": 9}
    assert find_max_lengths(module, ["rows", "ids"], {"rows": 5}) == {"rows": 5}
    assert find_max_lengths(nn.Linear(2, 2), ["rows"], None) == {}

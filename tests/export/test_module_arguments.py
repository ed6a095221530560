"""Arguments of `export_module` that do not fit each other are refused before anything is written."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attention_serving.artifact.manifest import GraphKind
from attention_serving.export import export_module
from attention_serving.export.errors import ExportError


class Adding(nn.Module):
    """Adds the ids' mean to rows, and what a test makes of that."""

    def __init__(self, change: Callable[[Tensor], Any] = lambda rows: rows) -> None:
        super().__init__()
        self.change = change

    def forward(self, rows: Tensor, ids: Tensor) -> Any:
        return self.change(rows + ids.float().mean(dim=1)[:, None, None])


EXAMPLES = {"rows": torch.zeros(2, 3, 4), "ids": torch.zeros(2, 5, dtype=torch.int64)}
AXES: dict[str, dict[int, str]] = {"rows": {0: "batch", 1: "length"}, "ids": {0: "batch", 1: "ids_length"}}


def axes(**changed: dict[int, str]) -> dict[str, Any]:
    return {"dynamic_axes": AXES | changed}


def changing(change: Callable[[Tensor], Any]) -> dict[str, Any]:
    return {"module": Adding(change)}


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "axis 0 of another name": (
        axes(rows={0: "sequences", 1: "length"}),
        r"dynamic_axes\['rows'\]=.*: must name axis 0 'batch' and axis 1",
    ),
    "axis 0 missing": (axes(rows={1: "length"}), r"dynamic_axes\['rows'\]"),
    "axis 1 missing": (axes(rows={0: "batch"}), r"dynamic_axes\['rows'\]"),
    "axis 1 named batch": (axes(rows={0: "batch", 1: "batch"}), r"dynamic_axes\['rows'\]"),
    "axis 2 named": (axes(rows={0: "batch", 1: "length", 2: "width"}), r"dynamic_axes\['rows'\]"),
    "input without axes": ({"dynamic_axes": {"rows": AXES["rows"]}}, "dynamic_axes has no entry for 'ids'"),
    "axes of no input": (
        axes(other={0: "batch", 1: "length"}),
        r"dynamic_axes\['other'\]: not an input; the inputs are rows, ids",
    ),
    "float64": (
        {"example_inputs": EXAMPLES | {"rows": torch.zeros(2, 3, 4, dtype=torch.float64)}},
        r"example_inputs\['rows'\] is torch.float64; an input is one of float32, int64, bool",
    ),
    "too many inputs": (
        {"example_inputs": (*EXAMPLES.values(), torch.zeros(2, 3, 4))},
        "3 example_inputs; forward takes rows, ids",
    ),
    "too many output names": (
        {"output_names": ["context_vectors", "other"]},
        r"output_names=\['context_vectors', 'other'\]: the module returns 1 outputs",
    ),
    "too few output names": (
        changing(lambda rows: (rows, rows)),
        r"output_names=\['context_vectors'\]: the module returns 2 outputs",
    ),
    "axis of no input": (
        changing(lambda rows: torch.cat([rows, rows], dim=1)),
        "output 'context_vectors': its axis of sizes .* is not an axis of an input",
    ),
    "output without batch": (changing(lambda rows: rows.mean(dim=0)), "must begin with the batch axis"),
    "output of float64": (changing(lambda rows: rows.double()), "is torch.float64"),
    "name with a slash": ({"name": "a/b"}, "name='a/b': must match"),
    "version 0": ({"version": 0}, "version=0: must be a positive integer"),
}


class Positioned(nn.Module):
    """Takes an input with a name that requests reserve."""

    def forward(self, rows: Tensor, positions: Tensor) -> Tensor:
        return rows + positions[..., None]


def test_an_input_with_a_reserved_name_is_refused(tmp_path: Path) -> None:
    examples = {"rows": EXAMPLES["rows"], "positions": torch.ones(2, 3)}
    dynamic_axes = {"rows": AXES["rows"], "positions": AXES["rows"]}
    with pytest.raises(ValueError, match="positions has a meaning of its own in requests"):
        export_module(Positioned(), examples, dynamic_axes, name="positioned", out=tmp_path)


def test_an_input_that_forward_does_not_take_is_refused(tmp_path: Path) -> None:
    examples = EXAMPLES | {"other": torch.zeros(2, 3)}
    dynamic_axes = AXES | {"other": AXES["rows"]}
    with pytest.raises(ValueError, match="other"):
        export_module(Adding(), examples, dynamic_axes, name="adding", out=tmp_path)


@pytest.mark.parametrize(("changed", "message"), REFUSED.values(), ids=REFUSED)
def test_arguments_that_do_not_fit_are_refused(changed: dict[str, Any], message: str, tmp_path: Path) -> None:
    given: dict[str, Any] = {
        "module": Adding(),
        "example_inputs": EXAMPLES,
        "dynamic_axes": AXES,
        "name": "adding",
        "out": tmp_path,
    }
    with pytest.raises(ValueError, match=message):
        export_module(**(given | changed))
    assert not list(tmp_path.iterdir())


class FiveSequences(nn.Module):
    """Takes five sequences, each with a length of its own."""

    def forward(self, a: Tensor, b: Tensor, c: Tensor, d: Tensor, e: Tensor) -> Tensor:
        return a + sum(rows.mean(dim=1, keepdim=True) for rows in (b, c, d, e))


class FourSequences(nn.Module):
    """Takes four."""

    def forward(self, a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
        return a + sum(rows.mean(dim=1, keepdim=True) for rows in (b, c, d))


def sequences(names: str) -> dict[str, Any]:
    dynamic_axes = {name: {0: "batch", 1: f"{name}_length"} for name in names}
    return {"example_inputs": {name: torch.zeros(2, 3, 4) for name in names}, "dynamic_axes": dynamic_axes}


def test_more_than_four_sequence_axes_are_refused_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"5 sequence axes \(a_length, .*\); at most 4 are supported"):
        export_module(FiveSequences(), **sequences("abcde"), out=tmp_path, name="five")
    assert not list(tmp_path.iterdir())


def test_four_sequence_axes_are_exported(tmp_path: Path) -> None:
    _, manifest = export_module(FourSequences(), **sequences("abcd"), out=tmp_path, name="four")
    assert len(manifest.graphs[GraphKind.PLAIN].inputs) == 4


class Caching(nn.Module):
    """Returns more than tensors, as models with a cache do."""

    def forward(self, src: Tensor) -> dict[str, Any]:
        return {"rows": src, "cache": [src]}


def test_an_output_that_is_not_a_tensor_is_refused_by_type(tmp_path: Path) -> None:
    axes = {"src": {0: "batch", 1: "sequence"}}
    with pytest.raises(ValueError, match="the module returns list; outputs must be tensors"):
        export_module(Caching(), (torch.zeros(2, 3, 4),), axes, out=tmp_path, name="caching")


class MixesTheBatch(nn.Module):
    """Gives each sequence what others of its batch decide."""

    def forward(self, src: Tensor) -> Tensor:
        return src - src.mean(dim=0, keepdim=True)


def test_a_module_that_mixes_the_sequences_of_a_batch_is_refused(tmp_path: Path) -> None:
    axes = {"src": {0: "batch", 1: "sequence"}}
    with pytest.raises(ValueError, match="the result of a sequence depends on its batch"):
        export_module(MixesTheBatch(), (torch.zeros(2, 3, 4),), axes, out=tmp_path, name="mixes")
    assert not list(tmp_path.iterdir())


class Noisy(nn.Module):
    """Uses an operator that ONNX Runtime has no kernel for at float32 on CPU."""

    def forward(self, src: Tensor) -> Tensor:
        return src + torch.rand_like(src) * 0


def test_a_graph_without_cpu_kernels_is_refused(tmp_path: Path) -> None:
    axes = {"src": {0: "batch", 1: "sequence"}}
    with pytest.raises(ExportError, match="no CPU kernels"):
        export_module(Noisy(), (torch.zeros(2, 3, 4),), axes, out=tmp_path, name="noisy")
    assert not list(tmp_path.iterdir())


def test_a_single_tensor_is_refused(tmp_path: Path) -> None:
    axes = {"src": {0: "batch", 1: "sequence"}}
    with pytest.raises(ValueError, match="give tensors by name"):
        export_module(MixesTheBatch(), torch.zeros(2, 3, 4), axes, out=tmp_path, name="one")  # type: ignore[arg-type]

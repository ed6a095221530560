"""Checkpoints and files that are refused, each by what is wrong with it; hostile files run nothing."""

import pickle
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from attention_serving.model.checkpoints import CheckpointError
from attention_serving.model.checkpoints.layouts import LAYOUTS
from attention_serving.model.checkpoints.loading import load_checkpoint
from tests.model.checkpoints import HEADS, D, Tensors, tensors_of, write

Change = Callable[[Tensors], object]


def drop(name: str) -> Change:
    return lambda tensors: tensors.pop(name)


def put(**values: Tensor) -> Change:
    return lambda tensors: tensors.update({name.replace("__", "."): value for name, value in values.items()})


def shape(*sizes: int) -> Tensor:
    return torch.ones(sizes)


def refusal_of(path: Path, *, layout: str = "bert", heads: Any = HEADS, **options: Any) -> str:
    with pytest.raises(CheckpointError) as refusal:
        load_checkpoint(path, layout=layout, heads=heads, **options)
    assert str(path) in str(refusal.value)
    return str(refusal.value)


@pytest.mark.parametrize("layout", ["torch", "bert", "gpt2", "llama", "clip", "generic"])
def test_the_tensors_that_the_refused_ones_are_made_of_are_sound(tmp_path: Path, layout: str) -> None:
    load_checkpoint(write(tensors_of(layout), tmp_path / "w.pt"), layout=layout, heads=HEADS)


def misshapen(name: str, expected: tuple[int, ...], found: tuple[int, ...]) -> list[str]:
    return [f"a.0.{name}: expected shape {expected}, found {found}"]


UNFIT: list[tuple[str, Change, list[str]]] = [
    ("llama", drop("k_proj.bias"), ["a.0.k_proj.bias: missing"]),
    (
        "bert",
        lambda tensors: [tensors.pop("self.key.weight"), tensors.update({"self.gate.weight": shape(2)})],
        ["a.0.self.key.weight: missing", "a.0.self.gate.weight: unexpected"],
    ),
    ("torch", put(bias_k=shape(1, 1, D)), ["a.0.bias_k: unexpected"]),
    ("llama", put(q_norm__weight=shape(4)), ["a.0.q_norm.weight: unexpected"]),
    ("bert", put(self__query__weight=shape(9, 10)), misshapen("self.query.weight", (D, D), (9, 10))),
    ("gpt2", put(c_attn__weight=shape(36, D)), misshapen("c_attn.weight", (D, 36), (36, D))),
    ("llama", put(k_proj__weight=shape(6, D)), misshapen("k_proj.weight", (4, D), (6, D))),
    (
        "llama",
        put(k_proj__weight=shape(8, D), v_proj__weight=shape(8, D)),
        ["num_kv_heads=2: must divide num_heads=3"],
    ),
    ("generic", put(projections__key__weight=shape(0, D)), ["expected a matrix, found shape (0, 12)"]),
    ("bert", put(self__query__weight=shape(D)), ["expected a matrix, found shape (12,)"]),
    (
        "bert",
        put(self__key__weight=torch.ones(D, D, dtype=torch.int8)),
        ["a.0.self.key.weight: has elements of type torch.int8, expected one of torch.float16"],
    ),
    (
        "bert",
        lambda tensors: tensors.update({f"x{i:03}": torch.ones(1) for i in range(200)}),
        ["x000: unexpected", "and 188 more"],
    ),
]


@pytest.mark.parametrize(("layout", "change", "messages"), UNFIT, ids=[messages[0] for *_, messages in UNFIT])
def test_what_does_not_fit_is_reported_by_name(
    tmp_path: Path, layout: str, change: Change, messages: list[str]
) -> None:
    tensors = tensors_of(layout)
    change(tensors)
    path = write({f"a.0.{name}": tensor for name, tensor in tensors.items()}, tmp_path / "w.safetensors")
    refusal = refusal_of(path, layout=layout, prefix="a.0.")
    for message in messages:
        assert message in refusal
    assert "x199" not in refusal


@pytest.mark.parametrize("prefix", ["", "encoder.layer.7.attention.", "encoder.layer.0.attention"])
def test_a_wrong_prefix_is_refused_with_those_that_would_do(tmp_path: Path, prefix: str) -> None:
    prefixes = [f"encoder.layer.{layer}.attention." for layer in range(3)]
    tensors = {
        each + name: tensor.clone() for each in prefixes for name, tensor in tensors_of("bert").items()
    }
    refusal = refusal_of(write(tensors, tmp_path / "w.safetensors"), prefix=prefix)
    assert f"prefix {prefix!r}" in refusal
    assert all(repr(each) in refusal for each in prefixes)


OPTIONS: list[tuple[str, dict[str, Any], str]] = [
    ("bert", {"layout": "brt"}, ", ".join(sorted(LAYOUTS))),
    ("bert", {"heads": 5}, "heads=5: must divide 12"),
    ("bert", {"heads": True}, "heads=True: must be a positive integer"),
    ("gpt2", {"layout": "gpt2", "cross": True}, "is self-attention"),
    ("llama", {"layout": "llama", "rotary_theta": -1.0}, "rotary_theta=-1.0"),
    ("fused", {"layout": "generic", "cross": True}, "must not be fused with cross"),
]


@pytest.mark.parametrize(("layout", "options", "message"), OPTIONS)
def test_options_that_cannot_be_are_refused(
    tmp_path: Path, layout: str, options: dict[str, Any], message: str
) -> None:
    assert message in refusal_of(write(tensors_of(layout), tmp_path / "w.safetensors"), **options)


class Hostile:
    """Its pickle creates a file when it is loaded."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Callable[[Path], None], tuple[Path]]:
        return Path.touch, (self.marker,)


@pytest.mark.parametrize(
    "save", [torch.save, lambda it, to: to.write_bytes(pickle.dumps(it, protocol=2))], ids=["zip", "pickle"]
)
def test_a_pickle_that_runs_code_is_refused_without_running_it(
    tmp_path: Path, save: Callable[[Any, Path], None]
) -> None:
    marker = tmp_path / "ran"
    save({"self.query.weight": Hostile(marker)}, tmp_path / "w.pt")
    assert "can run code" in refusal_of(tmp_path / "w.pt")
    assert not marker.exists()


CONTENTS: list[tuple[object, str]] = [
    (nn.Linear(2, 2), "save the state_dict() of the module"),
    ([torch.ones(2)], "holds list, not a mapping"),
    ({f"embedding.{i:02}": torch.ones(1) for i in range(40)}, "embedding.00"),
    (tensors_of("bert") | {"self.query.weight": 7}, "self.query.weight: missing"),
    (tensors_of("bert") | {"self.query.weight": torch.eye(D).to_sparse()}, "expected a dense tensor"),
    (tensors_of("bert") | {"self.query.weight": shape(1, 1).expand(D, D)}, "repeats fewer elements"),
]


@pytest.mark.parametrize(("contents", "message"), CONTENTS, ids=[message for _, message in CONTENTS])
def test_contents_other_than_plain_tensors_of_a_layout_are_refused(
    tmp_path: Path, contents: object, message: str
) -> None:
    torch.save(contents, tmp_path / "w.pt")
    assert message in refusal_of(tmp_path / "w.pt")


def test_another_kind_of_file_a_missing_one_and_a_folder_are_refused(tmp_path: Path) -> None:
    assert ".safetensors, .pt, .pth, .bin" in refusal_of(tmp_path / "model.safetensors.index.json")
    for name in ("w.safetensors", "w.pt"):
        assert "cannot be read" in refusal_of(tmp_path / name)
        (tmp_path / name).mkdir()
        assert "cannot be read" in refusal_of(tmp_path / name)


@pytest.fixture(scope="module", params=[".safetensors", ".pt"])
def sound(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tensors_of("bert"), tmp_path_factory.mktemp("sound") / f"w{request.param}")


@given(contents=st.binary(max_size=200), cut=st.floats(0, 0.99))
def test_damaged_files_are_refused(sound: Path, contents: bytes, cut: float) -> None:
    whole = sound.read_bytes()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / sound.name
        for damaged in (contents, whole[: int(len(whole) * cut)]):
            path.write_bytes(damaged)
            refusal_of(path)

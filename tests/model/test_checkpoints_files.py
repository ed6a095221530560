"""Files that are not checkpoints, and hostile ones, are refused."""

import pickle
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

from tests.model.test_checkpoints_refusals import D, refusal_of, tensors_of


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


def test_a_whole_module_is_refused_with_what_to_save_instead(tmp_path: Path) -> None:
    torch.save(nn.Linear(2, 2), tmp_path / "w.pt")
    assert "save the state_dict() of the module" in refusal_of(tmp_path / "w.pt")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        pytest.param(7, "self.query.weight: holds int, not a tensor", id="number"),
        pytest.param(torch.eye(D).to_sparse(), "expected a dense tensor", id="sparse"),
        pytest.param(torch.ones(D, D, device="meta"), "expected a dense tensor", id="without-elements"),
        pytest.param(torch.ones(1, 1).expand(D, D), "repeats fewer elements", id="one-element-for-all"),
    ],
)
def test_values_other_than_plain_tensors_are_refused(tmp_path: Path, value: object, message: str) -> None:
    torch.save(tensors_of("bert") | {"self.query.weight": value}, tmp_path / "w.pt")
    assert message in refusal_of(tmp_path / "w.pt")


def test_a_file_without_the_layout_is_refused_with_some_of_its_names(tmp_path: Path) -> None:
    save_file({f"embedding.{i:02}": torch.ones(1) for i in range(40)}, tmp_path / "w.safetensors")
    refusal = refusal_of(tmp_path / "w.safetensors")
    assert "embedding.00" in refusal
    assert "and 28 more" in refusal


def test_a_list_of_tensors_is_refused(tmp_path: Path) -> None:
    torch.save([torch.ones(2)], tmp_path / "w.pt")
    assert "holds list, not a mapping" in refusal_of(tmp_path / "w.pt")


@pytest.mark.parametrize("name", ["w.onnx", "w", "model.safetensors.index.json"])
def test_another_kind_of_file_is_refused_with_the_kinds_that_are_read(tmp_path: Path, name: str) -> None:
    assert ".safetensors, .pt, .pth, .bin" in refusal_of(tmp_path / name)


@pytest.mark.parametrize("name", ["w.safetensors", "w.pt"])
def test_a_missing_file_is_refused_by_name(tmp_path: Path, name: str) -> None:
    assert str(tmp_path / name) in refusal_of(tmp_path / name)


@pytest.mark.parametrize("name", ["w.safetensors", "w.pt"])
def test_a_folder_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    assert "cannot be read" in refusal_of(tmp_path / name)


def sound_bytes(suffix: str) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"w{suffix}"
        (torch.save if suffix == ".pt" else save_file)(tensors_of("bert"), path)
        return path.read_bytes()


SOUND = {suffix: sound_bytes(suffix) for suffix in (".safetensors", ".pt")}


@settings(deadline=None)
@given(suffix=st.sampled_from(sorted(SOUND)), contents=st.binary(max_size=200), cut=st.floats(0, 0.99))
def test_damaged_files_are_refused(suffix: str, contents: bytes, cut: float) -> None:
    sound = SOUND[suffix]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"w{suffix}"
        for damaged in (contents, sound[: int(len(sound) * cut)]):
            path.write_bytes(damaged)
            assert str(path) in refusal_of(path)

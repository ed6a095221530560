"""`python -m export --weights`: the export of a checkpoint, and its errors in one line."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from typer.testing import CliRunner, Result

from attention_serving.artifact.golden import GoldenCase, load_golden
from attention_serving.artifact.manifest import (
    ATTENTION_GRAPHS,
    ATTENTION_MASK,
    KEY_LENGTHS,
    GraphKind,
    Manifest,
)
from attention_serving.export.__main__ import app
from tests.support.eager import assert_parity

ROOT = Path(__file__).resolve().parents[2]
PREFIX = "encoder.layer.0.attention."
D, HEADS, NAME = 8, 2, "brought"


def bert_tensors() -> dict[str, Tensor]:
    """The attention of a first layer as BERT names it, with its LayerNorm and an unrelated tensor."""
    generator = torch.Generator().manual_seed(13)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator) * 0.4

    tensors = {"embeddings.word_embeddings.weight": normal(3, D)}
    for layer in ("self.query", "self.key", "self.value", "output.dense"):
        tensors[f"{PREFIX}{layer}.weight"] = normal(D, D)
        tensors[f"{PREFIX}{layer}.bias"] = normal(D)
    for kind in ("weight", "bias"):
        tensors[f"{PREFIX}output.LayerNorm.{kind}"] = normal(D)
    return tensors


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("weights") / "bert.safetensors"
    save_file(bert_tensors(), path)
    return path


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("brought")


@pytest.fixture(scope="module")
def printed(weights: Path, repository: Path) -> list[str]:
    """The output of one export, line by line."""
    options = ["--layout", "bert", "--prefix", PREFIX, "--heads", str(HEADS), "--name", NAME]
    done = subprocess.run(
        [sys.executable, "-m", "export", "--weights", weights, *options, "--out", repository],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_skipped_names_and_the_artifact_are_printed(printed: list[str], repository: Path) -> None:
    skipped = [f"{PREFIX}output.LayerNorm.{kind}" for kind in ("bias", "weight")]
    assert printed[:2] == [f"skipped (not part of attention): {name}" for name in skipped]
    assert printed[2] == str(repository / NAME / "1")
    assert f"{4 * (D * D + D)} parameters" in printed[3]


@pytest.mark.usefixtures("printed")
def test_the_artifact_is_that_of_the_checkpoint(repository: Path, weights: Path) -> None:
    folder = repository / NAME / "1"
    manifest = Manifest.load(folder)
    manifest.verify_files(folder)
    assert (manifest.name, manifest.version, manifest.precision) == (NAME, 1, "fp32")
    assert (manifest.num_heads, manifest.causal) == (HEADS, False)
    assert manifest.config["d_query"] == D
    assert manifest.description == f"bert checkpoint {weights.name}, {PREFIX}"
    report = json.loads((folder / manifest.parity_report).read_text())
    assert report["cases"]
    assert all(case["within_tolerance"] for case in report["cases"])


def of_torch() -> nn.MultiheadAttention:
    """PyTorch's own module with the weights of the file."""
    tensors = {name.removeprefix(PREFIX): tensor for name, tensor in bert_tensors().items()}
    module = nn.MultiheadAttention(D, HEADS, batch_first=True)
    layers = [f"self.{name}" for name in ("query", "key", "value")]
    module.load_state_dict(
        {
            "in_proj_weight": torch.cat([tensors[f"{layer}.weight"] for layer in layers]),
            "in_proj_bias": torch.cat([tensors[f"{layer}.bias"] for layer in layers]),
            "out_proj.weight": tensors["output.dense.weight"],
            "out_proj.bias": tensors["output.dense.bias"],
        }
    )
    return module.eval()


def allowed(case: GoldenCase) -> Tensor:
    """The (B, H, T, T) mask of a golden case, True = may attend."""
    batch, length, _ = case.inputs["query"].shape
    mask = np.ones((batch, HEADS, length, length), bool)
    if KEY_LENGTHS in case.inputs:
        mask &= np.arange(length) < case.inputs[KEY_LENGTHS][:, None, None, None]
    return torch.from_numpy(mask & case.inputs.get(ATTENTION_MASK, np.True_))


@pytest.mark.usefixtures("printed")
@pytest.mark.parametrize("kind", ATTENTION_GRAPHS)
def test_golden_outputs_equal_those_of_pytorch_with_the_same_weights(
    repository: Path, kind: GraphKind
) -> None:
    cases = [
        case for case in load_golden(repository / NAME / "1" / "golden.safetensors") if case.graph is kind
    ]
    assert cases
    for case in cases:
        may, query = allowed(case), torch.from_numpy(case.inputs["query"])
        # PyTorch's module returns NaN for a row that may attend to nothing.
        rows = may.any(dim=-1).all(dim=1)  # (B, T)
        with torch.inference_mode():
            context, weights = of_torch()(
                query, query, query, attn_mask=~may.flatten(0, 1), average_attn_weights=False
            )
        assert rows.any()
        assert_parity(case.outputs["context_vectors"][rows.numpy()], context[rows].numpy())
        if kind is GraphKind.WEIGHTS:
            found = case.outputs["attention_weights"].swapaxes(1, 2)  # (B, T, H, T)
            assert_parity(found[rows.numpy()], weights.transpose(1, 2)[rows].numpy())


def invoke(weights: Path, repository: Path, **options: str) -> Result:
    """Runs the command in this process, without the options that are empty."""
    given = {"layout": "bert", "prefix": PREFIX, "heads": str(HEADS), "name": "refused"} | options
    arguments = [part for name, value in given.items() if value for part in (f"--{name}", value)]
    command = ["--weights", str(weights), *arguments, "--out", str(repository)]
    return CliRunner().invoke(app, command)


def assert_refused(done: Result, part: str, repository: Path, status: int = 1) -> None:
    assert (done.exit_code, done.stdout) == (status, "")
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert part in done.stderr
    assert not list(repository.iterdir())


REFUSED: dict[str, tuple[dict[str, str], str]] = {
    "another layout": ({"layout": "gpt2"}, "no tensor of the layout"),
    "wrong prefix": (
        {"prefix": "encoder.layer.1.attention."},
        f"this prefix has no tensor of the layout; these prefixes have: '{PREFIX}'",
    ),
    "no prefix": ({"prefix": ""}, f"these prefixes have: '{PREFIX}'"),
    "heads that do not divide": ({"heads": "3"}, "heads=3: must divide 8"),
}


@pytest.mark.parametrize(("options", "part"), REFUSED.values(), ids=REFUSED)
def test_options_that_do_not_fit_the_file_are_refused_in_one_line(
    weights: Path, tmp_path: Path, options: dict[str, str], part: str
) -> None:
    assert_refused(invoke(weights, tmp_path, **options), part, tmp_path)


def edited(tmp_path_factory: pytest.TempPathFactory, **changed: Any) -> Path:
    """The file with tensors changed, or removed where None."""
    tensors = bert_tensors() | {PREFIX + name: tensor for name, tensor in changed.items()}
    path = tmp_path_factory.mktemp("edited") / "bert.safetensors"
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, path)
    return path


EDITED: dict[str, tuple[dict[str, Any], str]] = {
    "tensor missing": ({"self.key.bias": None}, f"{PREFIX}self.key.bias: missing"),
    "tensor of another shape": (
        {"self.key.weight": torch.zeros(D, D + 1)},
        f"{PREFIX}self.key.weight: expected shape (8, 8), found (8, 9)",
    ),
    "tensor of integers": (
        {"self.key.weight": torch.zeros(D, D, dtype=torch.int64)},
        f"{PREFIX}self.key.weight: has elements of type int64",
    ),
    "tensor that changes what is computed": (
        {"self.distance_embedding.weight": torch.zeros(9, 4)},
        f"{PREFIX}self.distance_embedding.weight: adds a term for the distance",
    ),
}


@pytest.mark.parametrize(("changed", "part"), EDITED.values(), ids=EDITED)
def test_tensors_that_do_not_fit_are_refused_by_name(
    changed: dict[str, Any], part: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    assert_refused(invoke(edited(tmp_path_factory, **changed), tmp_path), part, tmp_path)


FILES: dict[str, tuple[str, bytes | None, str]] = {
    "absent": ("absent.safetensors", None, "cannot be read as safetensors"),
    "no tensors": ("text.safetensors", b"not a file of tensors", "cannot be read as safetensors"),
    "a damaged pickle": ("text.pt", b"not a pickle", "text.pt"),
    "of another kind": ("weights.npz", b"", "the file's name must end in one of .safetensors, .pt"),
}


@pytest.mark.parametrize(("file", "content", "part"), FILES.values(), ids=FILES)
def test_a_file_that_cannot_be_read_is_refused_in_one_line(
    file: str, content: bytes | None, part: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("files") / file
    if content is not None:
        path.write_bytes(content)
    assert_refused(invoke(path, tmp_path), part, tmp_path)


def test_a_description_states_the_cost_of_a_preset() -> None:
    done = CliRunner().invoke(app, ["multi-head-768x12", "--describe"])
    assert (done.exit_code, done.stderr) == (0, "")
    assert "2,360,064 parameters" in done.stdout

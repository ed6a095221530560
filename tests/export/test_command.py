"""`python -m export`: options, exports of presets, checkpoints and encoders, and errors in one line."""

import tomllib
from pathlib import Path
from typing import Any

import onnxruntime
import pytest
import torch
from typer.testing import CliRunner, Result

from attention_serving.artifact.certificate import CERTIFICATE_FILE, check_certificate
from attention_serving.artifact.manifest import GraphKind, Manifest
from attention_serving.export import sign, verify
from attention_serving.export.__main__ import app
from attention_serving.model.presets import PRESETS
from scripts.local_server import ROOT
from tests.model.checkpoints import HEADS, D, tensors_of, write
from tests.server.samples import TEXT
from tests.support.keys import new_key, write_keys
from tests.support.processes import run_python
from tests.support.tables import TABLES

PREFIX = "encoder.layer.0.attention."
PRESET, CHECKPOINT = ["multi-head-64x4", "--out", "models"], ["--weights", "a.safetensors", "--out", "models"]
BERT = [*CHECKPOINT, "--layout", "bert", "--heads", "2"]
KEY = new_key()


def run(*arguments: object, command: Any = app) -> Result:
    return CliRunner().invoke(command, [str(argument) for argument in arguments])


def assert_refused(done: Result, status: int, part: str) -> None:
    assert (done.exit_code, done.stdout) == (status, "")
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert part in done.stderr


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ([*PRESET, "--causal"], "--causal needs --weights"),
        ([*PRESET, "--example", "x=2,3"], "--example needs a module of your project"),
        (["a.b:c", "--out", "models", "--name", "a"], "--example is missing"),
        (["a.b:c", "--example", "x=2", "--encoder", "f"], "a.b:c and --encoder exclude each other"),
        (["a.b:c", "--example", "x=2", "--out", "models"], "--name is missing"),
        (["multi-head-64x4", "--layout", "bert", "--describe"], "--layout needs --weights"),
        ([*PRESET, "--pooling", "cls"], "--pooling needs --encoder"),
        ([*BERT, "multi-head-64x4"], "give one of them"),
        ([*BERT, "--name", "a", "--rotary-theta", "3"], "layout 'bert' has no rotary embedding"),
        ([*CHECKPOINT, "--layout", "bert"], "--heads is missing"),
        ([*CHECKPOINT, "--heads", "2"], "--layout is missing: give one of bert, clip, generic"),
        ([*CHECKPOINT, "--heads", "2", "--layout", "t5"], "layout 't5' does not exist; the layouts are"),
        (BERT, "--name is missing"),
        ([*BERT, "--name", "a", "--alias", "b//c"], "alias 'b//c': must match"),
        (["self-attention"], "--out is missing"),
        ([], "name a preset (--list shows them), or give --weights"),
        (["no-such-preset", "--out", "models"], "'no-such-preset' does not exist"),
        (["self-attention", "--encoder", "f"], "--encoder and a preset exclude each other"),
        (["--encoder", "f", "--weights", "w"], "--encoder and --weights exclude each other"),
        (["--encoder", "f", "--pooling", "top"], "--pooling 'top' does not exist"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_wrong_usage_ends_with_status_2_and_one_line(arguments: list[str], part: str) -> None:
    assert_refused(run(*arguments), 2, part)


def test_what_the_command_can_do_is_listed() -> None:
    listed = run("--list")
    assert (listed.exit_code, listed.stderr) == (0, "")
    first = {line.split()[0] for line in listed.stdout.splitlines() if not line.startswith(" ")}
    assert first == {"preset", *PRESETS}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert run("--tool-version").stdout == project["version"] + "\n"
    published = TABLES["parameter_count"]["parameters"]
    assert f"{published:,} parameters" in run("multi-head-768x12", "--describe").stdout


def test_help_list_and_refusals_do_not_import_pytorch() -> None:
    """PyTorch takes seconds to import."""
    code = (
        "import sys, attention_serving.export.__main__ as main, attention_serving.export\n"
        "for arguments in (['-h'], ['--list'], ['-V'], ['self-attention'], ['x', '--out', 'y']):\n"
        "    try: main.app(arguments)\n"
        "    except SystemExit: pass\n"
        "assert callable(attention_serving.export.export_module)\n"
        "print(sorted({'torch', 'onnx', 'onnxruntime'} & set(sys.modules)))"
    )
    assert run_python("-c", code).stdout.splitlines()[-1] == "[]"


def test_a_preset_is_exported_signed_and_written_for_other_servers(artifacts: Path, tmp_path: Path) -> None:
    private, public = write_keys(tmp_path, KEY)
    given = [TEXT, "--out", tmp_path / "models", "--name", "renamed", "--version", 3]
    done = run(*given, "--sign-key", private, "--target", "triton", "--target", "onnx")
    assert done.exit_code == 0, done.output
    folder = tmp_path / "models/renamed/3"
    lines = [line.strip() for line in done.stdout.splitlines()]
    assert lines[0] == str(folder)
    assert f"signed with key {KEY.public_key.keyid}" in lines
    assert f"triton: {folder.parent / 'config.pbtxt'}" in lines
    assert f"onnx: {folder.parent / 'onnx/3/model.onnx'}" in lines

    manifest, other = Manifest.load(folder), Manifest.load(artifacts / TEXT / "1")
    manifest.verify_files(folder)
    check_certificate(folder, manifest, [KEY.public_key])
    assert (manifest.name, manifest.version) == ("renamed", 3)
    assert manifest.description == PRESETS[TEXT].description
    # Another process has written the same module to the same bytes.
    assert {**manifest.files, "parity.json": ""} == {**other.files, "parity.json": ""}

    says = "replace it (--replace, replace=True), or choose another version: 4 is free"
    assert_refused(run(*given, "--seed", 1), 1, says)

    verified = run(folder, "--public-key", public, command=verify.app)
    first, *lines = verified.stdout.splitlines()
    assert (verified.exit_code, first) == (0, str(folder))
    assert lines[0].startswith("  renamed version 3, fp32, ")
    assert lines[1].startswith("  largest difference from eager PyTorch ")
    assert f"onnxruntime {onnxruntime.__version__}" in lines[3]
    (folder / CERTIFICATE_FILE).unlink()
    signed = run(folder, "--key", private, command=sign.app)
    assert (signed.exit_code, signed.stdout.splitlines()[1:]) == (0, lines)


def test_a_wrong_key_is_refused_before_anything_is_done(tmp_path: Path) -> None:
    file = tmp_path / "text.pem"
    file.write_text("text")
    done = run("self-attention", "--out", tmp_path / "out", "--sign-key", file)
    assert_refused(done, 1, f"error: {file}: is not a private key in PEM format")
    assert_refused(
        run(tmp_path, "--public-key", file, command=verify.app), 2, f"error: --public-key {file}: "
    )
    assert_refused(run(tmp_path, "--key", file, command=sign.app), 2, f"error: --key {file}: ")
    assert [path.name for path in tmp_path.iterdir()] == ["text.pem"]


def test_what_cannot_be_read_is_refused_with_status_1(tmp_path: Path) -> None:
    _, public = write_keys(tmp_path, KEY)
    absent = tmp_path / "no-such"
    assert_refused(
        run(absent, "--public-key", public, command=verify.app), 1, "manifest.json: cannot be read"
    )
    given = ["--name", "n", "--out", tmp_path / "out"]
    assert_refused(run("--encoder", absent, *given), 1, "`hf download NAME --local-dir FOLDER`")
    given += ["--layout", "bert", "--heads", 2]
    assert_refused(run("--weights", absent.with_suffix(".pt"), *given), 1, "no-such.pt")


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """The attention of a first layer as BERT names it, with its LayerNorm and an unrelated tensor."""
    tensors = {f"{PREFIX}{name}": tensor for name, tensor in tensors_of("bert").items()}
    tensors |= {f"{PREFIX}output.LayerNorm.{kind}": torch.ones(D) for kind in ("weight", "bias")}
    return write(
        tensors | {"embeddings.word_embeddings.weight": torch.ones(3, D)}, tmp_path / "bert.safetensors"
    )


SKIPPED = [f"skipped (not part of attention): {PREFIX}output.LayerNorm.{kind}" for kind in ("bias", "weight")]


def test_a_checkpoint_is_described(weights: Path) -> None:
    given = ["--weights", weights, "--layout", "bert", "--heads", HEADS, "--describe"]
    lines = run(*given, "--prefix", PREFIX, "--causal").stdout.splitlines()
    assert lines[:2] == SKIPPED
    assert lines[2] == f"bert checkpoint {weights.name}, {PREFIX}"
    assert f"num_heads={HEADS}" in lines[3]
    assert "causal=True" in lines[3]
    assert lines[4] == f"  {4 * (D * D + D)} parameters"
    says = f"this prefix has no tensor of the layout; these prefixes have: '{PREFIX}'"
    assert_refused(run(*given, "--prefix", "encoder.layer.1.attention."), 1, says)


PROJECT = """
from torch import nn


class Sums(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.inner = nn.Embedding(1000, 4), nn.Linear(4, 4)

    def forward(self, src, ids):
        return self.inner(src.mean(1)) + self.words(ids).mean(1)


NUMBER = 3
"""


def test_a_module_of_a_project_is_exported_from_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ranking_project.py").write_text(PROJECT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    examples = ["--example", "src=2,3,4", "--example", "ids=2,3:int64<10"]
    dry = run("ranking_project:Sums", *examples, "--dry-run")
    assert dry.exit_code == 0
    assert "'ids': {0: 'batch', 1: 'ids_length'}" in " ".join(dry.stdout.split())
    assert not (tmp_path / "R").exists()
    done = run("ranking_project:Sums", *examples, "--name", "ranker", "--out", "R")
    assert done.exit_code == 0, done.stderr
    assert "understood: dynamic_axes={'src'" in done.stderr
    manifest = Manifest.model_validate_json((tmp_path / "R/ranker/1/manifest.json").read_bytes())
    bounds = [spec.exclusive_upper_bound for spec in manifest.graphs[GraphKind.PLAIN].inputs]
    assert bounds == [None, 1000]
    for reference, part in (("ranking_project:NUMBER", "is int; name a"), ("none:x", "cannot be imported")):
        refused = run(reference, *examples, "--dry-run")
        assert_refused(refused, 1, part)
    assert_refused(run("ranking_project:Sums", "--example", "src", "--dry-run"), 1, "must be such as src=2,3")
    masked = run("ranking_project:Sums", *examples, "--mask", "src=True", "--dry-run")
    assert_refused(masked, 1, "masks['src']='True': must be None, 'True hides', 'True attends'")

"""ONNX files that exist already: what is served, by which judge, and what is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from attention_client import AttentionClient
from onnx import TensorProto, parser
from onnxruntime.quantization import quantize_dynamic
from torch import Tensor, nn
from typer.testing import CliRunner

from attention_serving.artifact.certificate import check_certificate
from attention_serving.artifact.golden import golden_cases
from attention_serving.artifact.manifest import GraphKind, Manifest
from attention_serving.export import ExportError, ParityError, export_onnx, verify
from attention_serving.export.__main__ import app
from scripts.local_server import serving
from tests.support import triton
from tests.support.eager import Array, assert_parity
from tests.support.keys import new_key, write_keys

INPUTS, OUTPUTS = ["input_ids", "attention_mask", "token_type_ids"], ["last_hidden_state", "pooler_output"]
EVALUATOR = "ReferenceEvaluator of onnx"
# Self-attention of x with scores that a mask is added to.
ATTENTION = """
    keys = Transpose<perm=[0, 2, 1]>(x) scores = MatMul(x, keys) masked = Add(scores, bias)
    weights = Softmax<axis=-1>(masked) y = MatMul(weights, x)
"""
HIDING = "rows = Unsqueeze({mask}, one) real = Cast<to=1>(rows) bias = Mul(real, low)" + ATTENTION
CONSTANTS = "<int64[1] one = {1}, float[1] low = {-1e30}>"
ROWS = "float[N, T, 4] x", "float[N, T, 4] y"


class Bert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(100, 16), nn.Embedding(48, 16)
        self.types, self.norm = nn.Embedding(2, 16), nn.LayerNorm(16)
        self.projections, self.output = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, ids: Tensor, mask: Tensor, types: Tensor) -> tuple[Tensor, Tensor]:
        batch, length = ids.shape
        rows = self.norm(self.words(ids) + self.positions(torch.arange(length)) + self.types(types))
        query, key, value = self.projections(rows).view(batch, length, 3, 2, 8).permute(2, 0, 3, 1, 4)
        scores = query @ key.transpose(-1, -2) / 3 + (1 - mask[:, None, None].float()) * -1e30
        rows = self.norm(rows + self.output((scores.softmax(-1) @ value).transpose(1, 2).flatten(2)))
        return rows, torch.tanh(rows[:, 0])


def write_bert(path: Path, *, lengths: bool = True) -> Bert:
    """Writes the file as many projects have it; without dynamic lengths, for 7 rows."""
    torch.manual_seed(0)
    module, example = Bert().eval(), (torch.ones(2, 7, dtype=torch.int64),) * 2
    axes = {name: {0: "batch_size", 1: "sequence_length"} for name in (*INPUTS, OUTPUTS[0])}
    axes = {name: {0: names[0]} if not lengths else names for name, names in axes.items()}
    torch.onnx.export(
        module,
        (*example, torch.zeros(2, 7, dtype=torch.int64)),
        path,
        dynamo=False,
        opset_version=14,
        input_names=INPUTS,
        output_names=OUTPUTS,
        dynamic_axes=axes | {OUTPUTS[1]: {0: "batch_size"}},
    )
    return module


def run(module: Bert, *inputs: Array) -> list[Array]:
    with torch.inference_mode():
        return [output.numpy() for output in module(*map(torch.from_numpy, inputs))]


def vectors(module: Bert) -> dict[str, Array]:
    """Three sequences, of which two are padded, by name."""
    rng = np.random.default_rng(0)
    mask = (np.arange(9) < np.array([[9], [4], [1]])).astype(np.int64)
    inputs = [rng.integers(100, size=(3, 9)), mask, rng.integers(2, size=(3, 9))]
    return dict(zip([*INPUTS, *OUTPUTS], [*inputs, *run(module, *inputs)], strict=True))


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Bert]:
    path = tmp_path_factory.mktemp("bert") / "bert.onnx"
    return path, write_bert(path)


def write(folder: Path, body: str, inputs: str, outputs: str, *, opset: int = 13, weights: str = "") -> Path:
    """Writes a file of operators as text."""
    domains = f'"": {opset}, "com.microsoft": 1, "com.unknown": 1'
    text = f"<ir_version: 8, opset_import: [{domains}]> g ({inputs}) => ({outputs}) {weights} {{ {body} }}"
    onnx.save(parser.parse_model(text), folder / "model.onnx")
    return folder / "model.onnx"


def export(file: Path, folder: Path, **options: Any) -> Manifest:
    return export_onnx(file, out=folder / "models", name="m", **options)[1]


def inputs_of(manifest: Manifest) -> list[tuple[Any, ...]]:
    return [(spec.name, *spec.axes) for spec in manifest.graphs[GraphKind.PLAIN].inputs]


def test_a_file_with_golden_vectors_is_served(bert: tuple[Path, Bert], tmp_path: Path) -> None:
    file, module = bert
    golden, models, key = tmp_path / "golden.npz", tmp_path / "models", new_key()
    private, public = write_keys(tmp_path, key)
    np.savez(golden, **vectors(module))  # type: ignore[arg-type]  # names of arrays
    arguments = ["--onnx", file, "--golden", golden, "--name", "bert", "--out", models, "--sign-key", private]
    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert done.exit_code == 0, done.output
    assert "largest difference from golden vectors of golden.npz" in done.output
    folder = models / "bert" / "1"
    manifest, report = Manifest.load(folder), json.loads((folder / "parity.json").read_text())
    assert [*manifest.graphs] == [GraphKind.PLAIN, GraphKind.LENGTHS]
    assert manifest.judge == report["reference"] == "golden vectors of golden.npz"
    assert manifest.max_lengths == {"sequence_length": 48}
    assert {case["judge"] for case in report["cases"]} == {None, "the file in ONNX Runtime"}
    assert "PyTorch" not in json.dumps(report)
    proof = check_certificate(folder, manifest, [key.public_key]).proof
    assert (proof.judge, proof.cases) == (manifest.judge, 4)
    shown = CliRunner().invoke(verify.app, [str(folder), "--public-key", str(public)])
    assert "largest difference from golden vectors of golden.npz" in shown.output
    rng = np.random.default_rng(1)
    ids = [rng.integers(100, size=length) for length in (1, 5, 48)]
    types = [rng.integers(2, size=len(rows)) for rows in ids]
    with (
        serving(models, tmp_path / "log", "--proof-public-key", str(public)) as server,
        AttentionClient(server.target) as client,
    ):
        (model,) = client.models()
        assert model.parity is not None
        assert model.parity.judge == manifest.judge
        results = client.infer("bert", {"input_ids": ids, "token_type_ids": types})
        padded = vectors(module)
        answer = triton.infer(
            server.target,
            "bert",
            {name: padded[name] for name in ("input_ids", "token_type_ids")}
            | {"key_lengths": padded["attention_mask"].sum(1)},
            OUTPUTS,
        )
    for at, (rows, kinds) in enumerate(zip(ids, types, strict=True)):
        alone = run(module, rows[None], np.ones((1, len(rows)), np.int64), kinds[None])
        for name, expected in zip(OUTPUTS, alone, strict=True):
            assert_parity(results.outputs[name][at], expected[0])
    assert_parity(answer["pooler_output"], padded["pooler_output"])


def test_the_reference_evaluator_judges_without_golden_vectors(
    bert: tuple[Path, Bert], tmp_path: Path
) -> None:
    """Weights beside the file, in one folder with it, are copied."""
    file = tmp_path / "bert.onnx"
    onnx.save(onnx.load(bert[0]), file, save_as_external_data=True, location="bert.bin", size_threshold=0)
    manifest = export(file, tmp_path)
    assert manifest.judge.startswith(EVALUATOR)
    assert inputs_of(manifest) == [(name, "batch", "sequence_length") for name in (INPUTS[0], INPUTS[2])]
    assert [spec.exclusive_upper_bound for spec in manifest.graphs[GraphKind.PLAIN].inputs] == [100, 2]
    assert manifest.parameters > 0
    assert export(file, tmp_path) == manifest


def test_a_file_with_fixed_lengths_takes_its_mask_as_an_input(tmp_path: Path) -> None:
    write_bert(tmp_path / "fixed.onnx", lengths=False)
    manifest = export(tmp_path / "fixed.onnx", tmp_path)
    names = ["input_ids", "attention_mask_input", "token_type_ids"]
    assert inputs_of(manifest) == [(name, "batch", 7) for name in names]
    assert [*manifest.graphs] == [GraphKind.PLAIN]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            lambda v: v | {OUTPUTS[1]: v[OUTPUTS[1]] + 1e-3},
            ParityError,
            "golden vectors of golden.npz by 0.001",
        ),
        (lambda v: {n: v[n] for n in v if n != OUTPUTS[0]}, ExportError, "case 0 lacks last_hidden_state"),
        (lambda v: v | {"typo": v[INPUTS[0]]}, ExportError, "'typo' of int64 is not an input or output"),
        (lambda v: v | {INPUTS[0]: v[INPUTS[0]][0]}, ExportError, r"input_ids is \[9\] in case 0, and \["),
        (lambda v: v | {INPUTS[1]: v[INPUTS[1]][:, ::-1]}, ExportError, "hides rows before others"),
        (lambda v: v | {INPUTS[0]: v[INPUTS[0]] + 0.5}, ExportError, "'input_ids' of float64"),
    ],
    ids=["differ", "incomplete", "unknown", "shape", "padding on the left", "type"],
)
def test_golden_vectors_that_do_not_fit_are_refused(
    bert: tuple[Path, Bert],
    tmp_path: Path,
    change: Callable[[dict[str, Array]], dict[str, Array]],
    error: type[Exception],
    message: str,
) -> None:
    np.savez(tmp_path / "golden.npz", **change(vectors(bert[1])))  # type: ignore[arg-type]
    with pytest.raises(error, match=message):
        export(bert[0], tmp_path, golden=tmp_path / "golden.npz")
    assert not (tmp_path / "models" / "m" / "1").exists()


PADDING = HIDING.format(mask="src_padding_mask"), f"{ROWS[0]}, bool[N, T] src_padding_mask", ROWS[1]
ACCEPTED: dict[str, tuple[tuple[str, str, str], str, dict[str, Any]]] = {
    "float16": (
        ("s = MatMul(x, w) y = Softmax(s)", "float16[N, T, 4] x", "float16[N, T, 4] y"),
        "<float16[4, 4] w = {1, 2, 3, 4, 5, 6, 7, 8, 1, 1, 1, 1, 0, 0, 0, 1}>",
        {"precision": "fp16", "lengths": False},
    ),
    "padding mask": (PADDING, CONSTANTS, {"precision": "fp32", "lengths": True}),
    "images of bytes": (
        (
            "f = Cast<to=1>(x) y = ReduceMean<axes=[1, 2], keepdims=0>(f)",
            "uint8[N, 6, 6, 3] x",
            "float[N, 3] y",
        ),
        "",
        {"inputs": [("x", "batch", 6, 6, 3)]},
    ),
    "axes without names": (
        ("y = Add(a, b)", "float[unk__1, unk__2, 4] a, float[unk__3, unk__4, 4] b", "float[?, ?, 4] y"),
        "",
        {"inputs": [("a", "batch", "sequence", 4), ("b", "batch", "sequence", 4)]},
    ),
    "another length": (
        ("z = ReduceSum<keepdims=1>(x, one) y = Concat<axis=1>(z, x)", ROWS[0], "float[N, U, 4] y"),
        CONSTANTS,
        {"derived": ["T_1"]},
    ),
    "a branch on the length": (
        (
            "s = Shape(x) t = Gather(s, one) c = Greater(t, one) y = If(c)<then_branch = a () => "
            "(float[N, T, 4] u) { u = Relu(x) }, else_branch = b () => (float[N, T, 4] v) { v = Neg(x) }>",
            *ROWS,
        ),
        CONSTANTS,
        {"lengths": False},
    ),
    "fixed scales": (
        ("q = QuantizeLinear(x, s, z) y = DequantizeLinear(q, s, z)", *ROWS),
        "<float s = {0.03}, uint8 z = {128}>",
        {"precision": "int8", "alone": False},
    ),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_files_of_other_forms_are_accepted(tmp_path: Path, name: str) -> None:
    (body, inputs, outputs), weights, expected = ACCEPTED[name]
    manifest = export(write(tmp_path, body, inputs, outputs, weights=weights), tmp_path)
    facts = {
        "precision": manifest.precision,
        "lengths": GraphKind.LENGTHS in manifest.graphs,
        "inputs": inputs_of(manifest),
        "derived": [*manifest.derived_axes],
        "alone": manifest.runs_alone,
    }
    assert {key: facts[key] for key in expected} == expected


def test_names_that_requests_cannot_have_are_replaced(tmp_path: Path) -> None:
    file = write(tmp_path, "y = Relu(x)", *ROWS)
    model = onnx.load(file)
    model.graph.input[0].name = model.graph.node[0].input[0] = "text"
    model.graph.output[0].name = model.graph.node[0].output[0] = "/encoder/y:0"
    onnx.save(model, file)
    x = np.array([[[1, -1, 0, 2]]], np.float32)
    np.savez(tmp_path / "golden.npz", **{"text": x, "/encoder/y:0": x.clip(0)})  # type: ignore[arg-type]
    manifest = export(file, tmp_path, golden=tmp_path / "golden.npz")
    graph = manifest.graphs[GraphKind.PLAIN]
    assert [spec.name for spec in (*graph.inputs, *graph.outputs)] == ["text_input", "encoder_y_0"]
    (case,) = golden_cases(tmp_path / "models" / "m" / "1", manifest, None)
    assert_parity(case.outputs["encoder_y_0"], x.clip(0))


def test_sequences_that_would_share_scales_run_alone(bert: tuple[Path, Bert], tmp_path: Path) -> None:
    quantize_dynamic(bert[0], tmp_path / "int8.onnx")
    manifest = export(tmp_path / "int8.onnx", tmp_path)
    assert (manifest.precision, manifest.runs_alone) == ("int8", True)
    assert [*manifest.graphs] == [GraphKind.PLAIN]


REFUSED: dict[str, tuple[tuple[str, str, str], str]] = {
    "batch of 1": (("y = Relu(x)", "float[1, 7, 4] x", "float[1, 7, 4] y"), "has no batch axis that varies"),
    "no batch": (
        ("k = Transpose(x) s = MatMul(x, k) y = MatMul(s, x)", "float[T, 4] x", "float[T, 4] y"),
        "the result of a sequence depends on its batch",
    ),
    "text": (("y = Identity(x)", "string[N] x", "string[N] y"), "x is STRING .* must be tensors of"),
    "third axis": (("y = Relu(x)", "float[N, 4, T] x", "float[N, 4, T] y"), "axis 2 of input x .* varies"),
    "random": (("r = RandomNormalLike(x) y = Add(x, r)", *ROWS), "RandomNormalLike draws random numbers"),
    "branch on values": (
        (
            "m = ReduceMax<keepdims=0>(x) c = Cast<to=9>(m) y = If(c)<then_branch = a () => "
            "(float[N, T, 4] u) { u = Relu(x) }, else_branch = b () => (float[N, T, 4] v) { v = Neg(x) }>",
            *ROWS,
        ),
        "If '' decides by values of inputs",
    ),
    "loop on values": (
        (
            "m = ReduceMax<keepdims=0>(x) n = Cast<to=7>(m) y = Loop(n, , x)<body = b (int64 i, bool c, "
            "float[N, T, 4] u) => (bool d, float[N, T, 4] v) { d = Identity(c) v = Relu(u) }>",
            *ROWS,
        ),
        "Loop '' decides by values of inputs",
    ),
    "unknown operator": (("y = com.unknown.Bar(x)", *ROWS), "does not run .* com.unknown:Bar"),
    "no judge": (
        ("y = com.microsoft.Gelu(x)", *ROWS),
        "Nothing else can judge ONNX Runtime: give golden vectors",
    ),
    "no number": (("y = Log(x)", *ROWS), "the module returns NaN for finite inputs"),
    "ids of no table": (("y = Cast<to=1>(x)", "int64[N, T] x", "float[N, T] y"), "their range is not known"),
    "pairs": (
        (ATTENTION, f"{ROWS[0]}, float[N, T, T] bias_mask", ROWS[1]),
        "is a mask of query and key rows",
    ),
    "opposite mask": (
        (HIDING.format(mask="attention_mask"), f"{ROWS[0]}, bool[N, T] attention_mask", ROWS[1]),
        "masks={'attention_mask': 'True hides'}",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_files_that_cannot_be_served_are_refused(tmp_path: Path, name: str) -> None:
    (body, inputs, outputs), message = REFUSED[name]
    body = body.replace("bias)", "bias_mask)") if name == "pairs" else body
    file = write(tmp_path, body, inputs, outputs, weights=CONSTANTS)
    with pytest.raises(ValueError, match=message):
        export(file, tmp_path)


def test_damaged_files_and_data_elsewhere_are_refused(bert: tuple[Path, Bert], tmp_path: Path) -> None:
    content, file = bert[0].read_bytes(), tmp_path / "model.onnx"
    for damaged in (b"", b"not ONNX", content[: len(content) // 2]):
        file.write_bytes(damaged)
        with pytest.raises(ExportError, match="not an ONNX"):
            export(file, tmp_path)
    model = onnx.load(bert[0])
    for location, message in (("../secret", "outside its folder"), ("missing.bin", "does not exist")):
        tensor = model.graph.initializer[0]
        tensor.data_location = TensorProto.EXTERNAL
        tensor.ClearField("raw_data")
        tensor.ClearField("external_data")
        tensor.external_data.add(key="location", value=location)
        file.write_bytes(model.SerializeToString())
        with pytest.raises(ExportError, match=message):
            export(file, tmp_path)

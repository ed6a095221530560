"""What the commands print and draw, asked of a server in this process; changes with the command line."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import numpy as np
import pytest

from attention_client._generated.attention.v1 import attention_pb2 as pb
from attention_client._generated.attention.v1 import attention_pb2_grpc as pb_grpc
from attention_client.cli import main

HEADS = 3
MODEL = pb.Model(
    name="m",
    version="3",
    state=pb.Model.STATE_READY,
    description="a model",
    inputs=[
        pb.Tensor(name="query", data_type=pb.DATA_TYPE_FP32, axes=[pb.Axis(name="batch"), pb.Axis(size=8)]),
        pb.Tensor(name="mask", data_type=pb.DATA_TYPE_BOOL, axes=[pb.Axis(name="batch")], optional=True),
    ],
    outputs=[pb.Tensor(name="attention_weights", data_type=pb.DATA_TYPE_FP32, optional=True)],
    num_heads=HEADS,
    parity=pb.Parity(relative_tolerance=1.3e-6, absolute_tolerance=1e-5, measured_max_abs_error=8.3e-7),
    parameters=1234567,
    cost=pb.Cost(flops_per_query=1000, flops_per_key=2000, flops_per_pair=16),
    provider="CPUExecutionProvider",
)


class Service(pb_grpc.AttentionServiceServicer):
    """Has one model; the words of a text are its tokens, and a head's number is in its weights."""

    def ListModels(self, request: pb.ListModelsRequest, context: grpc.ServicerContext):  # noqa: ARG002, N802
        return pb.ListModelsResponse(models=[MODEL])

    def GetModel(self, request: pb.GetModelRequest, context: grpc.ServicerContext):  # noqa: N802
        if (request.name, request.version) not in {("m", ""), ("m", "3"), ("failed", "")}:
            context.abort(grpc.StatusCode.NOT_FOUND, f"no model {request.name} {request.version}")
        failed = pb.Model(name="failed", state=pb.Model.STATE_FAILED, state_reason="missed tolerance")
        return pb.GetModelResponse(model=failed if request.name == "failed" else MODEL)

    def Attend(self, request: pb.AttendRequest, context: grpc.ServicerContext):  # noqa: ARG002, N802
        lengths = [len(text.replace(",", " , ").split()) for text in request.text.texts]
        weights = np.arange(HEADS * lengths[0] ** 2, dtype="<f4") / 100
        vectors = pb.VectorSequences(
            data_type=pb.DATA_TYPE_FP32, width=7, lengths=lengths, data=bytes(28 * sum(lengths))
        )
        answer = pb.AttendResponse(model_name="m", model_version="3", context_vectors=vectors)
        if request.return_weights and request.model_name != "mute":
            answer.attention_weights.CopyFrom(
                pb.AttentionWeights(
                    data_type=pb.DATA_TYPE_FP32,
                    num_heads=HEADS,
                    query_lengths=lengths,
                    key_lengths=lengths,
                    data=weights.tobytes(),
                )
            )
        return answer


@pytest.fixture(scope="module")
def server() -> Iterator[list[str]]:
    """The options that lead to a server."""
    running = grpc.server(ThreadPoolExecutor(2))
    pb_grpc.add_AttentionServiceServicer_to_server(Service(), running)
    port = running.add_insecure_port("127.0.0.1:0")
    running.start()
    yield ["--server", f"127.0.0.1:{port}"]
    running.stop(None).wait()


@pytest.fixture
def weights(server: list[str]) -> list[str]:
    """The command, without its text."""
    return [*server, "weights", "--model", "m", "--text"]


def test_models_are_a_table(server: list[str], capsys: pytest.CaptureFixture[str]):
    assert main([*server, "models"]) == 0
    header, row = capsys.readouterr().out.splitlines()
    assert header.split() == ["NAME", "VERSION", "STATE", "INPUTS", "PARITY"]
    assert header.index("INPUTS") == row.index("query float32 (batch, 8), mask? bool (batch)")
    assert row.endswith("8.3e-07 (atol 1e-05, rtol 1.3e-06)")


@pytest.mark.parametrize("version", [[], ["--version", "3"]], ids=["highest", "that-version"])
def test_a_description_says_everything(
    version: list[str], server: list[str], capsys: pytest.CaptureFixture[str]
):
    assert main([*server, "describe", "--model", "m", *version]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "name         m",
        "version      3",
        "state        ready",
        "description  a model",
        "inputs       query float32 (batch, 8)",
        "             mask bool (batch), may be left out",
        "outputs      attention_weights float32 (), where asked for",
        "text         not accepted",
        "heads        3",
        "causal       no",
        "parameters   1,234,567",
        "operations   1,000 for each query row",
        "             2,000 for each key row",
        "             16 for each pair of a query row and a key row",
        "             646,144 for 128 tokens: 384,000 for rows, 262,144 for pairs",
        "parity       |served - eager| <= 1e-05 + 1.3e-06 x |eager|; at most 8.3e-07 measured",
        "provider     CPUExecutionProvider",
    ]


def test_a_model_that_failed_is_described_too(server: list[str], capsys: pytest.CaptureFixture[str]):
    assert main([*server, "describe", "--model", "failed"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "state        failed: missed tolerance" in lines
    assert {"inputs       -", "operations   -", "parity       -"} <= set(lines)


def test_an_unknown_version_is_one_line(server: list[str], capsys: pytest.CaptureFixture[str]):
    assert main([*server, "describe", "--model", "m", "--version", "4"]) == 1
    assert capsys.readouterr().err == "error: no model m 4\n"


def test_rows_of_context_vectors_have_words(server: list[str], capsys: pytest.CaptureFixture[str]):
    assert main([*server, "text", "--model", "m", "short eat"]) == 0
    title, first, second = capsys.readouterr().out.splitlines()
    assert title == "short eat  (2, 7), m 3"
    assert first.split() == ["short", *["0.0000"] * 6, "..."]
    assert second.startswith("  eat     0.0000")


def test_weights_are_a_table_for_each_head(weights: list[str], capsys: pytest.CaptureFixture[str]):
    assert main([*weights, "dessert first"]) == 0
    assert capsys.readouterr().out == (
        "dessert first  (3, 2, 2), m, version 3; rows are queries, columns keys\n"
        "\nhead 0\n           dessert  first\n  dessert     0.00   0.01\n  first       0.02   0.03\n"
        "\nhead 1\n           dessert  first\n  dessert     0.04   0.05\n  first       0.06   0.07\n"
        "\nhead 2\n           dessert  first\n  dessert     0.08   0.09\n  first       0.10   0.11\n"
    )


def test_one_head_of_a_text_whose_tokens_are_not_its_words(
    weights: list[str], capsys: pytest.CaptureFixture[str]
):
    assert main([*weights, "short, eat", "--head", "1"]) == 0
    assert capsys.readouterr().out == (
        "short, eat  (3, 3, 3), m, version 3; rows are queries, columns keys\n"
        "\nhead 1\n        0     1     2\n"
        "  0  0.09  0.10  0.11\n  1  0.12  0.13  0.14\n  2  0.15  0.16  0.17\n"
    )


@pytest.mark.parametrize("head", [-1, HEADS])
def test_a_head_that_is_not_there_is_refused(
    head: int, weights: list[str], capsys: pytest.CaptureFixture[str]
):
    assert main([*weights, "dessert", f"--head={head}"]) == 1
    assert capsys.readouterr().err == f"error: --head: expected 0 to 2; found {head}\n"


def test_an_answer_without_weights_is_one_line(server: list[str], capsys: pytest.CaptureFixture[str]):
    assert main([*server, "weights", "--model", "mute", "--text", "dessert"]) == 1
    assert capsys.readouterr().err == "error: m answered no attention weights\n"


@pytest.mark.parametrize("head", [[], ["--head", "2"]], ids=["every-head", "one-head"])
def test_a_plot_is_a_picture(
    head: list[str], weights: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    pytest.importorskip("matplotlib")
    path = tmp_path / "weights.png"
    assert main([*weights, "dessert first", "--plot", str(path), *head]) == 0
    assert capsys.readouterr().out.startswith("dessert first  (3, 2, 2)")
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        pytest.param("missing/weights.png", "No such file", id="no-folder"),
        pytest.param("weights.nonesuch", "not supported", id="no-such-type"),
    ],
)
def test_a_plot_that_cannot_be_written_is_one_line(
    name: str, words: str, weights: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    pytest.importorskip("matplotlib")
    assert main([*weights, "dessert first", "--plot", str(tmp_path / name)]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert words in printed.err
    assert printed.err.count("\n") == 1

"""What the commands print, draw and write, with a gRPC server in this process."""

import json
import re
import sys
import types
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import grpc
import numpy as np
import pytest
import typer
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from typer.testing import CliRunner

from attention_client import __version__
from attention_client._commands.app import app
from attention_client._commands.session import _size
from attention_client._generated.attention.v1 import attention_pb2 as pb
from attention_client._generated.attention.v1 import attention_pb2_grpc as pb_grpc

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


FAILED = pb.Model(name="failed", version="1", state=pb.Model.STATE_FAILED, state_reason="missed tolerance")
UNREACHABLE = ["--server", "127.0.0.1:1"]
runner = CliRunner()


class Service(pb_grpc.AttentionServiceServicer):
    """Answers any input with zeros and with weights that count up; the words of a text are its tokens."""

    def __init__(self) -> None:
        self.requests: list[pb.AttendRequest] = []

    def ListModels(self, request: pb.ListModelsRequest, context: grpc.ServicerContext):  # noqa: ARG002, N802
        return pb.ListModelsResponse(models=[MODEL, FAILED])

    def GetModel(self, request: pb.GetModelRequest, context: grpc.ServicerContext):  # noqa: N802
        if (request.name, request.version) not in {("m", ""), ("m", "3"), ("failed", "")}:
            context.abort(grpc.StatusCode.NOT_FOUND, f"no model {request.name} {request.version}")
        return pb.GetModelResponse(model=FAILED if request.name == "failed" else MODEL)

    def Attend(self, request: pb.AttendRequest, context: grpc.ServicerContext):  # noqa: ARG002, N802
        self.requests.append(request)
        match request.WhichOneof("query_input"):
            case "text":
                lengths = [len(text.replace(",", " , ").split()) for text in request.text.texts]
            case "token_ids":
                lengths = list(request.token_ids.lengths)
            case _:
                lengths = list(request.query.lengths)
        keys = list(request.key.lengths) or lengths
        count = sum(HEADS * query * key for query, key in zip(lengths, keys, strict=True))
        weights = np.arange(count, dtype="<f4") / 100
        vectors = pb.VectorSequences(
            data_type=pb.DATA_TYPE_FP32, width=7, lengths=lengths, data=bytes(28 * sum(lengths))
        )
        answer = pb.AttendResponse(model_name="m", model_version="3", context_vectors=vectors)
        if request.return_offsets:
            for text in request.text.texts:
                spans = [found.span() for found in re.finditer(r",|[^\s,]+", text)]
                answer.token_offsets.lengths.append(len(spans))
                answer.token_offsets.starts.extend(start for start, _ in spans)
                answer.token_offsets.ends.extend(end for _, end in spans)
        if request.return_weights and request.model_name != "mute":
            answer.attention_weights.CopyFrom(
                pb.AttentionWeights(
                    data_type=pb.DATA_TYPE_FP32,
                    num_heads=HEADS,
                    query_lengths=lengths,
                    key_lengths=keys,
                    data=weights.tobytes(),
                )
            )
        return answer


@pytest.fixture(scope="module")
def service():
    return Service()


@pytest.fixture(scope="module")
def target(service: Service) -> Iterator[str]:
    """HOST:PORT of the server."""
    checks = health.HealthServicer()
    checks.set("", health_pb2.HealthCheckResponse.SERVING)
    running = grpc.server(ThreadPoolExecutor(2))
    pb_grpc.add_AttentionServiceServicer_to_server(service, running)
    health_pb2_grpc.add_HealthServicer_to_server(checks, running)
    port = running.add_insecure_port("127.0.0.1:0")
    running.start()
    yield f"127.0.0.1:{port}"
    running.stop(None).wait()


@pytest.fixture
def run(target: str):
    """Runs a command against the server and returns what it prints; fails unless it ends with 0."""

    def invoke(*arguments: object, **options: Any) -> str:
        done = runner.invoke(app, ["--server", target, *map(str, arguments)], **options)
        assert done.exit_code == 0, done.output
        return done.stdout

    return invoke


def failing(code: int, *arguments: object, **options: Any) -> str:
    """Runs a command that ends with this exit code, and returns what it prints on standard error."""
    done = runner.invoke(app, list(map(str, arguments)), **options)
    assert done.exit_code == code, done.output
    assert done.stdout == ""
    return done.stderr


def test_models_fit_80_columns(run: Any):
    lines = run("models").splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0].split() == ["MODEL", "VERSION", "STATE", "INPUTS", "MAX", "ERROR"]
    assert lines[1].split() == ["m", "3", "ready", "query", "float32", "(batch,", "8)", "8.3e-07"]
    assert lines[2].split() == ["mask?", "bool", "(batch)"]
    assert lines[-1] == "failed 1: failed: missed tolerance"


@pytest.mark.parametrize(
    "arguments",
    [["m"], ["--model", "m"], ["m", "--version", "3"]],
    ids=["argument", "option", "version-3"],
)
def test_a_description_states_everything(arguments: list[str], run: Any):
    assert run("describe", *arguments).splitlines() == [
        "name         m",
        "version      3",
        "state        ready",
        "description  a model",
        "inputs       query float32 (batch, 8)",
        "             mask bool (batch), optional",
        "outputs      attention_weights float32 (), on request",
        "text         not accepted",
        "heads        3",
        "causal       no",
        "parameters   1,234,567",
        "operations   1,000 for each query row",
        "             2,000 for each key row",
        "             16 for each pair of a query row and a key row",
        "             646,144 for 128 tokens: 384,000 for rows, 262,144 for pairs",
        "parity       |served - eager| <= 1e-05 + 1.3e-06 x |eager|; largest measured: 8.3e-07",
        "provider     CPUExecutionProvider",
    ]


def test_what_a_model_does_not_state_is_unknown(run: Any):
    lines = run("describe", "--model", "failed").splitlines()
    assert "state        failed: missed tolerance" in lines
    assert {"heads        - (not an attention module)", "causal       -"} <= set(lines)
    assert {"inputs       -", "operations   unknown", "parity       -"} <= set(lines)


def test_an_unknown_version_is_one_line(target: str):
    command = ["--server", target, "describe", "--model", "m", "--version", "4"]
    assert failing(1, *command) == "error: no model m 4\n"


def test_health(run: Any):
    assert run("health") == "ready\n"
    assert run("health", "--wait", "--json") == '{"ready": true}\n'
    assert "refused" in failing(1, *UNREACHABLE, "health")
    assert "was not ready within 0.2 s" in failing(1, *UNREACHABLE, "health", "--wait", "--timeout", "0.2")


def test_every_command_prints_json(run: Any):
    assert [model["name"] for model in json.loads(run("models", "--json"))] == ["m", "failed"]
    described = json.loads(run("--json", "describe", "--model", "failed"))
    assert (described["num_heads"], described["state_reason"]) == (None, "missed tolerance")
    result = json.loads(run("text", "--model", "m", "short eat", "--json"))
    assert result["context_vectors"] == [[[0.0] * 7] * 2]
    assert (result["model_version"], result["attention_weights"]) == ("3", None)
    weights = json.loads(run("weights", "--model", "m", "--text", "a b", "--head", 1, "--json"))
    assert weights["labels"] == ["a", "b"]
    np.testing.assert_allclose(weights["heads"]["1"], [[0.04, 0.05], [0.06, 0.07]], rtol=1e-6)
    tokens = json.loads(run("tokens", "--model", "m", 5, 6, "--weights", "-", "--json"))
    assert np.shape(tokens["attention_weights"]) == (HEADS, 2, 2)


@pytest.mark.parametrize("place", ["before", "after", "environment"])
def test_the_server_is_named_before_or_after_the_command_or_in_the_environment(place: str, target: str):
    option, none = ["--server", target], []
    before, after = {"before": (option, none), "after": (none, option)}.get(place, (none, none))
    wrong = {"ATTENTION_SERVER": target if place == "environment" else "127.0.0.1:1"}
    done = runner.invoke(app, [*before, "models", *after], env=wrong)
    assert done.exit_code == 0, done.output


def test_the_option_after_the_command_takes_precedence(target: str):
    done = runner.invoke(app, [*UNREACHABLE, "models", "--server", target])
    assert done.exit_code == 0, done.output


def test_rows_of_context_vectors_have_words(run: Any):
    title, first, second = run("text", "--model", "m", "short eat").splitlines()
    assert title == "short eat  (2, 7), m 3"
    assert first.split() == ["short", *["0.0000"] * 6, "..."]
    assert second.startswith("  eat     0.0000")


@pytest.mark.parametrize("source", ["file", "standard-input"])
def test_texts_are_read_from_a_file_or_standard_input(source: str, run: Any, tmp_path: Path):
    path, text = tmp_path / "texts", "eat\n\ndessert first\n"
    path.write_text(text)
    file = "-" if source == "standard-input" else path
    lines = run("text", "--model", "m", "--file", file, input=text).splitlines()
    assert [line for line in lines if not line.startswith(" ")] == [
        "eat  (1, 7), m 3",
        "dessert first  (2, 7), m 3",
    ]


@pytest.mark.parametrize(
    ("arguments", "given", "expected"),
    [
        pytest.param([3, 1, 2], "", ([3], [3, 1, 2]), id="arguments"),
        pytest.param(["--file", "-"], "3 1\n2\n", ([2, 1], [3, 1, 2]), id="lines"),
        pytest.param(["--file", "-"], "[[3, 1], [2]]", ([2, 1], [3, 1, 2]), id="json"),
        pytest.param(["--file", "-"], "[3, 1, 2]", ([3], [3, 1, 2]), id="json-of-one"),
    ],
)
def test_token_ids_are_read_from_arguments_or_a_file(
    arguments: list[Any], given: str, expected: Any, run: Any, service: Service
):
    run("tokens", "--model", "m", *arguments, input=given)
    sent = service.requests[-1].token_ids
    assert (list(sent.lengths), list(sent.ids)) == expected


def test_token_ids_are_read_from_an_array_file(run: Any, service: Service, tmp_path: Path):
    np.save(tmp_path / "ids.npy", np.array([[3, 1], [2, 0]]))
    run("tokens", "--model", "m", "--file", tmp_path / "ids.npy", "--lengths", "[2, 1]")
    assert list(service.requests[-1].token_ids.ids) == [3, 1, 2]


def test_attend_takes_every_argument_of_a_call(run: Any, service: Service, tmp_path: Path):
    for name, shape in (("query", (2, 3, 4)), ("key", (2, 5, 6)), ("value", (2, 5, 2))):
        np.save(tmp_path / f"{name}.npy", np.ones(shape))
    (tmp_path / "mask.json").write_text(json.dumps([[True, False, True, True, False]] * 2))
    files = {name: tmp_path / f"{name}.npy" for name in ("query", "key", "value")}
    files["mask"] = tmp_path / "mask.json"
    options = [item for name, path in files.items() for item in (f"--{name}", path)]
    out, weights = tmp_path / "out.npy", tmp_path / "weights.npz"
    printed = run(
        "attend", "--model", "m", "--version", "3", *options, "--lengths", "[5, 2]",
        "--positions", "-", "--out", out, "--weights", weights, input="[[0, 1, 2], [4, 5, 6]]",
    )  # fmt: skip
    sent = service.requests[-1]
    assert (sent.model_name, sent.model_version, sent.return_weights) == ("m", "3", True)
    assert list(sent.query.lengths) == [3, 3]
    assert list(sent.key.lengths) == list(sent.value.lengths) == [5, 2]
    assert list(sent.positions) == [0, 1, 2, 4, 5, 6]
    assert sent.mask.bits == bytes([0b0101101])
    assert printed == f"{out}: (2, 3, 7) float32 from m 3\n{weights}: (2, 3, 3, 5) float32\n"
    assert np.load(out).shape == (2, 3, 7)
    assert np.load(weights)["arr_0"].shape == (2, HEADS, 3, 5)


def test_several_sequences_are_read_from_and_written_to_npz(run: Any, tmp_path: Path):
    np.savez(tmp_path / "q.npz", np.ones((3, 4)), np.ones((1, 4)))
    out = tmp_path / "out.npz"
    run("attend", "--model", "m", "--query", tmp_path / "q.npz", "--out", out)
    with np.load(out) as archive:
        assert [archive[name].shape for name in archive.files] == [(3, 7), (1, 7)]


@pytest.mark.parametrize("query", ["[[1, 2], [3, 4]]", "[[[1, 2]], [[3, 4], [5, 6]]]"], ids=["one", "list"])
def test_json_is_read_and_written(query: str, run: Any, tmp_path: Path):
    out = tmp_path / "out.json"
    run("attend", "--model", "m", "--query", query, "--out", out)
    parsed = json.loads(out.read_text())
    assert parsed == ([[0.0] * 7] * 2 if query.startswith("[[1") else [[[0.0] * 7], [[0.0] * 7] * 2])


def test_attend_prints_vectors_and_weights(run: Any):
    lines = run(
        "attend", "--model", "m", "--query", "[[1], [2]]", "--key", "[[1]]", "--weights", "-"
    ).splitlines()
    assert lines[0] == "sequence 0  (2, 7), m 3"
    assert "sequence 0, head 2; rows are queries, columns keys" in lines


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param([], id="no-command"),
        pytest.param(["nonesuch"], id="unknown-command"),
        pytest.param(["text"], id="no-model"),
        pytest.param(["text", "--model", "m"], id="no-text"),
        pytest.param(["text", "--model", "m", "a", "--file", "-"], id="text-twice"),
        pytest.param(["text", "--model", "m", "--file", "/nonesuch"], id="missing-text-file"),
        pytest.param(["text", "--model", "m", "a", "--out", "a.npy"], id="npy-for-a-list"),
        pytest.param(["tokens", "--model", "m"], id="no-ids"),
        pytest.param(["tokens", "--model", "m", "a"], id="id-not-a-number"),
        pytest.param(["weights", "--model", "m"], id="no-text-for-weights"),
        pytest.param(["weights", "--model", "m", "--text", "a", "--head", "x"], id="head-not-a-number"),
        pytest.param(["weights", "--model", "m", "--text", "a", "--head", "-1"], id="negative-head"),
        pytest.param(["describe"], id="no-model-to-describe"),
        pytest.param(["describe", "m", "--model", "m"], id="model-named-twice"),
        pytest.param(["attend", "--model", "m"], id="no-query"),
        pytest.param(["attend", "--model", "m", "--query", "/nonesuch.npy"], id="missing-file"),
        pytest.param(["attend", "--model", "m", "--query", "[1"], id="broken-json"),
        pytest.param(["attend", "--model", "m", "--query", "-", "--key", "-"], id="standard-input-twice"),
        pytest.param(["attend", "--model", "m", "--query", "[[1]]", "--out", "a.txt"], id="unknown-suffix"),
        pytest.param(["attend", "--model", "m", "--query", "[[1]]", "--out", "/none/a.npy"], id="no-folder"),
        pytest.param(["--timeout", "x", "models"], id="timeout-not-a-number"),
        pytest.param(["models", "--timeout", "0"], id="no-time"),
        pytest.param(["models", "--server", "a,b"], id="several-without-ports"),
        pytest.param(["models", "--max-message-bytes", "0"], id="no-message"),
        pytest.param(["models", "--tls-ca", "/nonesuch"], id="missing-certificates"),
        pytest.param(["--server", "10.0.0.1:1", "models", "--token", "t"], id="token-without-tls"),
    ],
)
def test_wrong_usage_exits_with_2(arguments: list[str]):
    done = runner.invoke(
        app, [*UNREACHABLE, *arguments] if "--server" not in arguments else arguments, input=""
    )
    assert done.exit_code == 2, done.output


@pytest.mark.parametrize("content", [b"text", b"\x93NUMPY", b"PK\3\4", b"\xff\xfe", b'{"a": 1}', b""])
def test_a_file_that_is_not_an_array_is_refused(content: bytes, tmp_path: Path):
    path = tmp_path / "query"
    path.write_bytes(content)
    assert "not a .npy, .npz or JSON" in " ".join(
        failing(2, *UNREACHABLE, "attend", "--model", "m", "--query", path).replace("│", " ").split()
    )


def test_a_pickle_is_not_loaded(tmp_path: Path):
    np.save(tmp_path / "q.npy", np.array([{}], object), allow_pickle=True)
    failing(2, *UNREACHABLE, "attend", "--model", "m", "--query", tmp_path / "q.npy")


def test_a_wrong_array_is_one_line_and_nothing_is_written(tmp_path: Path):
    out = tmp_path / "out.npy"
    command = ["attend", "--model", "m", "--query", "[[[[[1.0]]]]]", "--out", out.with_suffix(".npz")]
    assert failing(1, *UNREACHABLE, *command).startswith("error: query[0]: expected (T, d)")
    assert not out.exists()


def test_no_server_is_one_line():
    printed = failing(1, *UNREACHABLE, "models")
    assert printed.startswith("error: ")
    assert printed.count("\n") == 1


def test_the_version_is_the_clients():
    done = runner.invoke(app, ["--version"])
    assert (done.exit_code, done.stdout) == (0, f"attention-client {__version__}\n")


def test_help_has_groups_and_units():
    shown = " ".join(runner.invoke(app, ["attend", "--help"]).stdout.replace("│", " ").split())
    for words in ("Inputs", "Output", "Connection", "in seconds, above 0", "a size such as 1GiB"):
        assert words in shown


@pytest.mark.parametrize("option", ["--model ", ""], ids=["option", "argument"])
def test_names_of_models_are_completed(target: str, option: str):
    environment = {
        "_ATTENTION_CLIENT_COMPLETE": "complete_bash",
        "COMP_WORDS": f"attention-client describe {option}f",
        "COMP_CWORD": "3" if option else "2",
        "ATTENTION_SERVER": target,
    }
    done = runner.invoke(app, [], env=environment, prog_name="attention-client")
    assert done.stdout.split() == ["failed"]
    done = runner.invoke(
        app, [], env={**environment, "ATTENTION_SERVER": "127.0.0.1:1"}, prog_name="attention-client"
    )
    assert done.stdout.split() == []


def test_weights_are_a_table_for_each_head(run: Any):
    assert run("weights", "--model", "m", "--text", "dessert first") == (
        "dessert first  (3, 2, 2), m, version 3; rows are queries, columns keys\n"
        "\nhead 0\n           dessert  first\n  dessert     0.00   0.01\n  first       0.02   0.03\n"
        "\nhead 1\n           dessert  first\n  dessert     0.04   0.05\n  first       0.06   0.07\n"
        "\nhead 2\n           dessert  first\n  dessert     0.08   0.09\n  first       0.10   0.11\n"
    )


def test_weights_are_labelled_with_the_tokens_and_not_the_words(run: Any):
    assert run("weights", "--model", "m", "--text", "short, eat", "--head", "1") == (
        "short, eat  (3, 3, 3), m, version 3; rows are queries, columns keys\n"
        "\nhead 1\n         short     ,   eat\n"
        "  short   0.09  0.10  0.11\n  ,       0.12  0.13  0.14\n  eat     0.15  0.16  0.17\n"
    )


def test_a_head_that_does_not_exist_is_one_line(target: str):
    command = ["--server", target, "weights", "--model", "m", "--text", "dessert"]
    assert failing(1, *command, "--head", HEADS) == f"error: --head: expected 0 to 2; found {HEADS}\n"


def test_a_model_without_weights_is_one_line(target: str):
    command = ["--server", target, "weights", "--model", "mute", "--text", "dessert"]
    assert failing(1, *command) == "error: model 'm' does not return attention weights\n"


@pytest.mark.parametrize("head", [[], ["--head", "2"]], ids=["every-head", "one-head"])
def test_a_plot_is_a_picture(head: list[str], run: Any, tmp_path: Path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "weights.png"
    shown = run("weights", "--model", "m", "--text", "dessert first", "--plot", path, *head)
    assert shown.startswith("dessert first  (3, 2, 2)")
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        pytest.param("missing/weights.png", "No such file", id="no-folder"),
        pytest.param("weights.nonesuch", "not supported", id="unknown-suffix"),
    ],
)
def test_a_plot_that_cannot_be_written_is_one_line(name: str, words: str, target: str, tmp_path: Path):
    pytest.importorskip("matplotlib")
    command = ["--server", target, "weights", "--model", "m", "--text", "dessert first"]
    printed = failing(1, *command, "--plot", tmp_path / name)
    assert words in printed
    assert printed.count("\n") == 1


def test_a_plot_without_matplotlib_names_the_extra_and_calls_no_server(monkeypatch: pytest.MonkeyPatch):
    for name in ("matplotlib", "attention_client._heat_maps"):
        monkeypatch.setitem(sys.modules, name, None)
    command = ["weights", "--model", "m", "--text", "a", "--plot", "a.png"]
    assert "extra 'plot'" in failing(1, *UNREACHABLE, *command)


@pytest.fixture
def enrich(monkeypatch: pytest.MonkeyPatch):
    """A command line in the place of enrichment's, which is tested beside it."""
    module, enrichment = types.ModuleType("attention_client.enrich.cli"), typer.Typer()

    @enrichment.command()
    def command(
        source: str, server: str = "", *, json: Annotated[bool, typer.Option("--json")] = False
    ) -> None:
        typer.echo(f"{source} {server}{' json' if json else ''}")

    module.app = enrichment
    monkeypatch.setitem(sys.modules, "attention_client.enrich.cli", module)


@pytest.mark.usefixtures("enrich")
def test_enrich_is_delegated_with_its_options():
    assert runner.invoke(app, ["enrich", "a", "--server", "b"]).stdout == "a b\n"
    assert runner.invoke(app, ["--server", "c", "enrich", "a"]).stdout == "a c\n"
    assert runner.invoke(app, ["--server", "c", "--json", "enrich", "a"]).stdout == "a c json\n"
    assert "attention-client enrich" in runner.invoke(app, ["enrich", "--help"]).stdout
    assert runner.invoke(app, ["enrich"]).exit_code == 2


@pytest.mark.usefixtures("enrich")
def test_options_that_enrich_does_not_support_are_refused():
    printed = failing(2, "--timeout", "3", "--wait", "enrich", "a")
    assert "enrich does not support --timeout, --wait" in " ".join(printed.replace("│", " ").split())


@pytest.mark.parametrize(
    ("text", "size"), [("7", 7), ("64MiB", 64 << 20), ("1 gib", 1 << 30), ("2KiB", 2048)]
)
def test_sizes_have_units(text: str, size: int):
    assert _size(text) == size


@pytest.mark.parametrize("text", ["", "MiB", "-1", "1.5MiB", "64 apples"])
def test_a_wrong_size_is_refused(text: str):
    assert "64MiB" in failing(2, "--max-message-bytes", text, "models")


def test_enrich_without_its_extra_is_one_line(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "attention_client.enrich.cli", None)
    assert "extra 'enrich'" in failing(1, "enrich", "a")

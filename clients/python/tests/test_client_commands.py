"""What the commands print, draw and write, with a gRPC server in this process."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from grpc_server import HEADS, Service, running
from typer.testing import CliRunner

from attention_client._commands.app import app
from attention_client._generated.attention.v1 import attention_pb2 as pb

QUERY = pb.Tensor(name="query", data_type=pb.DATA_TYPE_FP32, axes=[pb.Axis(name="batch"), pb.Axis(size=8)])
MASK = pb.Tensor(name="mask", data_type=pb.DATA_TYPE_BOOL, axes=[pb.Axis(name="batch")], optional=True)
IDS = pb.Tensor(
    name="ids", data_type=pb.DATA_TYPE_INT64, axes=[pb.Axis(size=2)], exclusive_upper_bounds=[9, 5]
)
MODEL = pb.Model(
    name="m",
    version="3",
    state=pb.Model.STATE_READY,
    inputs=[QUERY, MASK, IDS],
    accepts_text=True,
    num_heads=HEADS,
    parity=pb.Parity(relative_tolerance=1.3e-6, absolute_tolerance=1e-5, measured_max_abs_error=8.3e-7),
    cost=pb.Cost(flops_per_query=1000, flops_per_key=2000, flops_per_pair=16),
    attention_patterns=[pb.AttentionPattern(causal=True, window=3)],
)
FAILED = pb.Model(name="failed", version="1", state=pb.Model.STATE_FAILED, state_reason="missed tolerance")
UNREACHABLE = ["--server", "127.0.0.1:1"]
runner = CliRunner()


@pytest.fixture(scope="module")
def service():
    return Service(models=[MODEL, FAILED])


@pytest.fixture(scope="module")
def target(service: Service) -> Iterator[str]:
    """HOST:PORT of the server."""
    with running(service) as target:
        yield target


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
    return " ".join(done.stderr.replace("│", " ").split()) if code == 2 else done.stderr  # an error in a box


def test_a_reader_that_stops_ends_a_command_without_a_word(target: str):
    code = "import sys; from attention_client._commands.app import app; app()"
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-c", code, "--server", target, "weights", "--model", "m", "--text", "a b"]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, b"")


def test_models_are_listed_with_why_one_failed(run: Any):
    lines = run("models").splitlines()
    assert lines[1].split() == ["m", "3", "ready", "yes", "8.3e-07", "query", "float32", "(batch,", "8)"]
    assert lines[2].split() == ["mask", "bool", "(batch)", "optional"]
    assert lines[4].split() == ["failed", "1", "failed", "-", "-", "-"]
    assert lines[-1] == "failed 1: failed: missed tolerance"


def test_a_description_states_everything_and_what_is_unknown(run: Any):
    lines = dict(line.split(maxsplit=1) for line in run("describe", "m", "--version", "3").splitlines())
    assert (lines["state"], lines["num_heads"], lines["cost.flops_per_key"]) == ("ready", "3", "2000")
    assert (lines["inputs[1]"], lines["parity.absolute_tolerance"]) == ("mask bool (batch) optional", "1e-05")
    assert lines["inputs[2]"] == "ids int64 (2) 0 <= id < 9, 5 by column"
    lines = dict(line.split(maxsplit=1) for line in run("describe", "--model", "failed").splitlines())
    assert (lines["state_reason"], lines["num_heads"], lines["parity"]) == ("missed tolerance", "-", "-")


def test_health(run: Any):
    assert run("health", "--max-message-bytes", 1024) == "ready\n"
    assert run("health", "--wait", "--json") == '{"ready": true}\n'
    assert "was not ready within 0.2 s" in failing(1, *UNREACHABLE, "health", "--wait", "--timeout", "0.2")


@pytest.mark.parametrize("command", ["", "models", "attend", "context put", "enrich"])
def test_every_command_has_a_short_option_for_its_help(command: str):
    done = runner.invoke(app, [*command.split(), "-h"])
    assert (done.exit_code, "Usage" in done.stdout) == (0, True)


def test_every_command_prints_json(run: Any):
    assert [model["name"] for model in json.loads(run("models", "--json"))] == ["m", "failed"]
    assert json.loads(run("--json", "describe", "--model", "failed"))["num_heads"] is None
    result = json.loads(run("text", "--model", "m", "short eat", "--json", "--offsets"))
    assert (result["context_vectors"], result["offsets"]) == ([[[0.0] * 7] * 2], [[[0, 5], [6, 9]]])
    assert (result["model_version"], result["attention_weights"]) == ("3", None)
    weights = json.loads(run("weights", "--model", "m", "--text", "a b", "--head", 1, "--json"))
    assert weights["labels"] == ["a", "b"]
    np.testing.assert_allclose(weights["heads"]["1"], [[0.04, 0.05], [0.06, 0.07]], rtol=1e-6)
    weights = json.loads(run("weights", "--model", "m", "--ids", "-", "--json", input="[7, 5]"))
    assert (weights["labels"], np.shape(weights["heads"]["2"])) == (["7", "5"], (2, 2))


def test_the_server_is_named_after_the_command_before_it_or_in_the_environment(target: str):
    for arguments in (["models", "--server", target], ["--server", target, "models"], ["models"]):
        before = UNREACHABLE if arguments[-1] == target else []
        server = target if arguments == ["models"] else UNREACHABLE[1]
        done = runner.invoke(app, [*before, *arguments], env={"ATTENTION_SERVER": server})
        assert done.exit_code == 0, done.output


def test_texts_are_printed_with_their_tokens(run: Any, tmp_path: Path):
    path, text = tmp_path / "texts", "short eat\n\ndessert\n"
    path.write_text(text)
    for given in (["short eat", "dessert"], ["--file", path], ["--file", "-"]):
        title, first, second, other, _ = run("text", "--model", "m", *given, input=text).splitlines()
        assert (title, other) == ("short eat  (2, 7) float32, m 3", "dessert  (1, 7) float32, m 3")
        assert first.split() == ["short", *["0.0000"] * 6, "..."]
        assert second.startswith("  eat     0.0000")
    assert "  6:9 'eat'" in run("text", "--model", "m", "short eat", "--offsets")


def test_token_ids_are_read_from_arguments_or_a_file(run: Any, service: Service):
    for arguments, given, lengths in (
        ([3, 1, 2], "", [3]),
        (["--file", "-"], "3 1\n2\n", [2, 1]),
        (["--file", "-"], "[[3, 1], [2]]", [2, 1]),
    ):
        run("tokens", "--model", "m", *arguments, input=given)
        sent = service.requests[-1].token_ids
        assert (list(sent.lengths), list(sent.ids)) == (lengths, [3, 1, 2])


def test_attend_takes_every_argument_of_a_call(run: Any, service: Service, tmp_path: Path):
    shapes = {"query": (2, 3, 4), "key": (2, 5, 6), "value": (2, 5, 2)}
    for name, shape in shapes.items():
        np.save(tmp_path / f"{name}.npy", np.ones(shape))
    (tmp_path / "mask.json").write_text(json.dumps([[True, False, True, True, False]] * 2))
    options = [item for name in shapes for item in (f"--{name}", tmp_path / f"{name}.npy")]
    out, weights = tmp_path / "out.npy", tmp_path / "weights.npz"
    options += ["--mask", tmp_path / "mask.json", "--lengths", "[5, 2]", "--positions", "-"]
    options += ["--out", out, "--weights", weights, "--version", 3]
    printed = run("attend", "--model", "m", *options, input="[[0, 1, 2], [4, 5, 6]]")
    sent = service.requests[-1]
    assert (sent.model_name, sent.model_version, sent.return_weights) == ("m", "3", True)
    assert list(sent.query.lengths) == [3, 3]
    assert list(sent.key.lengths) == list(sent.value.lengths) == [5, 2]
    assert list(sent.positions) == [0, 1, 2, 4, 5, 6]
    assert sent.mask.bits == bytes([0b0101101])
    assert printed.splitlines() == [
        f"{out}: context_vectors  (2, 3, 4) float32, m 3",
        f"{weights}: attention_weights  (2, 3, 3, 5) float32, m 3",
    ]
    assert (np.load(out).shape, np.load(weights)["arr_0"].shape) == ((2, 3, 4), (2, HEADS, 3, 5))


def test_vectors_are_printed_with_weights_and_several_sequences_written_as_npz_and_json(
    run: Any, tmp_path: Path
):
    printed = run("attend", "--model", "m", "--query", "[[1], [2]]", "--key", "[[1]]", "--weights", "-")
    assert printed.startswith("context_vectors  (2, 1) float32, m 3\n[[1.]\n [2.]]\n")
    assert "attention_weights  (3, 2, 1) float32, m 3\n[[[0.  ]\n  [0.01]]" in printed
    np.savez(tmp_path / "q.npz", np.ones((3, 4)), np.ones((1, 4)))
    for query in (tmp_path / "q.npz", json.dumps([[[1.0] * 4] * 3, [[1.0] * 4]])):
        run("attend", "--model", "m", "--query", query, "--out", tmp_path / "out.npz")
        with np.load(tmp_path / "out.npz") as archive:
            assert [archive[name].shape for name in archive.files] == [(3, 4), (1, 4)]
        run("attend", "--model", "m", "--query", query, "--out", tmp_path / "out.json")
        assert json.loads((tmp_path / "out.json").read_text()) == [[[1.0] * 4] * 3, [[1.0] * 4]]


# By the arguments, words of what is said of them.
WRONG_USAGE = {
    "text --model m": "at least one",
    "text --model m a --file -": "not both",
    "tokens --model m": "at least one",
    "weights --model m": "give one of --text, --ids and --query",
    "weights --model m --text a --compare n": "--compare needs --html",
    "weights --model m --text a --key [[1]]": "--key and --value need --query",
    "weights --model m --query [[[1]],[[2]]]": "has 3 axes; one sequence has 2",
    "weights --model m --text a --html a.html --layer 0": "a page has all layers and heads",
    "describe": "NAME",
    "attend --model m --query /nonesuch.npy": "/nonesuch.npy",
    "attend --model m --query [[1]] --out a.txt": "a.txt",
    "attend --model m --query [[1]] --mask [True]": "write true and false as JSON does",
    "infer --model m --input x": "x",
    "infer --model m --input x=absent.npy": "absent.npy",
    "infer --model m --input x=[1] --input x=[1]": "x=[1]",
    "models --max-message-bytes 0": "'--max-message-bytes': Input should be greater",
    "models --tls-ca /nonesuch": "/nonesuch",
    "models --server 10.0.0.1:1 --token t": "token",
}


@pytest.mark.parametrize(("command", "words"), WRONG_USAGE.items())
def test_wrong_usage_exits_with_2(command: str, words: str):
    assert words in failing(2, *UNREACHABLE, *command.split(), input="")


@pytest.mark.parametrize("content", [b"text", b"\x93NUMPY", b"PK\3\4", b'{"a": 1}', b"pickle"])
def test_a_file_that_is_not_an_array_is_refused(content: bytes, tmp_path: Path):
    path = tmp_path / "query.npy"
    if content == b"pickle":
        np.save(path, np.array([{}], object), allow_pickle=True)
    else:
        path.write_bytes(content)
    assert "not a .npy, .npz or JSON" in failing(2, *UNREACHABLE, "attend", "--model", "m", "--query", path)


def test_errors_are_one_line_and_nothing_is_written(target: str, tmp_path: Path):
    command = ["attend", "--model", "m", "--query", "[[[[[1.0]]]]]", "--out", tmp_path / "out.npz"]
    assert failing(1, *UNREACHABLE, *command).startswith("error: --query[0]: expected (T, d)")
    command = ["attend", "--model", "m", "--query", "[[1.0]]", "--mask", "[1]"]
    assert failing(1, *UNREACHABLE, *command).startswith("error: --mask: expected booleans (in JSON, true")
    assert not list(tmp_path.iterdir())
    unreachable = failing(1, *UNREACHABLE, "models")
    assert unreachable.count("\n") == 1
    assert "start a server there, or name another (--server" in unreachable
    known, weights = ["--server", target], ["weights", "--text", "dessert", "--model"]
    for arguments, printed in (
        (["describe", "m", "--version", "4"], "no model m 4"),
        ([*weights, "m", "--head", HEADS], f"--head: expected 0 to 2; found {HEADS}"),
        ([*weights, "m", "--layer", 0], "--layer: the model is a single attention module"),
        ([*weights, "mute"], "model 'mute' does not return attention weights"),
    ):
        assert failing(1, *known, *arguments) == f"error: {printed}\n"


def test_weights_are_a_table_for_each_head_labelled_with_tokens(run: Any):
    assert run("weights", "--model", "m", "--text", "a, b", "--head", 1) == (
        "a, b  (3, 3, 3), m, version 3; rows are queries, columns keys\n"
        "\nhead 1\n        a     ,     b\n"
        "  a  0.09  0.10  0.11\n  ,  0.12  0.13  0.14\n  b  0.15  0.16  0.17\n"
    )


def test_a_page_has_the_answers_of_two_models(run: Any, tmp_path: Path):
    path = tmp_path / "a.html"
    other = ["--compare", "failed", "--compare-version", 1]
    run("weights", "--model", "m", "--text", "a, b", *other, "--html", path)
    data = path.read_text("utf-8").partition('<script type="application/json" id="answers">')[2]
    answers = json.loads(data.partition("</script>")[0])
    assert [(each["model"], each["version"]) for each in answers] == [("m", "3"), ("failed", "1")]
    for each in answers:
        assert (each["subject"], each["layers"], each["heads"]) == ("a, b", 1, HEADS)
        assert each["keys"] == ["a", ",", "b"]
    assert [each["patterns"] for each in answers] == [[{"causal": True, "window": 3}], []]


def test_a_plot_is_a_picture_and_without_matplotlib_names_the_extra_before_any_call(
    run: Any, target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    pytest.importorskip("matplotlib")
    path, command = tmp_path / "weights.png", ["weights", "--model", "m", "--text", "dessert first", "--plot"]
    assert run(*command, path, "--head", "2").startswith("dessert first  (3, 2, 2)")
    assert path.read_bytes().startswith(b"\x89PNG")
    assert "not supported" in failing(1, "--server", target, *command, tmp_path / "a.nonesuch")
    for name in ("matplotlib", "attention_client._commands.heat_maps"):
        monkeypatch.setitem(sys.modules, name, None)
    assert "extra 'plot'" in failing(1, *UNREACHABLE, *command, path)


def test_enrich_takes_the_options_before_it(monkeypatch: pytest.MonkeyPatch):
    given = ["enrich", "a.parquet", "b.parquet", "--model", "m", "--column", "c", "--retry-seconds", "0"]
    assert "127.0.0.1:1: " in failing(1, *UNREACHABLE, *given)
    assert "127.0.0.1:2: " in failing(1, *UNREACHABLE, *given, "--server", "127.0.0.1:2")
    assert "enrich does not support --timeout, --wait" in failing(2, "--timeout", "3", "--wait", *given)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.delitem(sys.modules, "attention_client.enrich.job", raising=False)
    assert "extra 'enrich'" in failing(1, *UNREACHABLE, *given)

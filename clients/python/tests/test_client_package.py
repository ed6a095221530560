"""The package as it is installed and started; changes with packaging and the command line."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import attention_client
from attention_client.cli import main

UNREACHABLE = ["--server", "127.0.0.1:1", "--timeout", "5"]


def python(*arguments: str):
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, check=False, timeout=120
    )


def test_everything_public_is_there():
    for name in attention_client.__all__:
        assert hasattr(attention_client, name)


def test_needs_neither_torch_nor_onnxruntime():
    done = python(
        "-c", "import sys, attention_client; sys.exit(bool({'torch', 'onnxruntime'} & set(sys.modules)))"
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "order", ["attention_client, tritonclient.grpc", "tritonclient.grpc, attention_client"]
)
def test_lives_beside_tritonclient(order: str):
    done = python("-c", f"import {order}")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param([], id="no-command"),
        pytest.param(["text"], id="no-model"),
        pytest.param(["text", "--model", "m"], id="no-text"),
        pytest.param(["weights", "--model", "m"], id="no-text-for-weights"),
        pytest.param(["weights", "--model", "m", "--text", "a", "--head", "x"], id="head-no-number"),
        pytest.param(["describe"], id="no-model-to-describe"),
        pytest.param(["attend", "--model", "m"], id="no-files"),
        pytest.param(["--timeout", "x", "models"], id="timeout-no-number"),
    ],
)
def test_wrong_usage_exits_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "usage:" in capsys.readouterr().err


def test_no_server_exits_with_1_and_one_line(capsys: pytest.CaptureFixture[str]):
    assert main([*UNREACHABLE, "models"]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("error: ")
    assert printed.err.count("\n") == 1


@pytest.mark.parametrize(
    ("write", "words"),
    [
        pytest.param(lambda _: None, "No such file", id="missing"),
        pytest.param(lambda path: path.write_bytes(b"text"), "pickle", id="not-npy"),
        pytest.param(lambda path: np.save(path, np.ones(3)), "query: expected", id="wrong-rank"),
    ],
)
def test_a_bad_file_exits_with_1_and_writes_nothing(
    write: Callable[[Path], object], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    query, out = tmp_path / "q.npy", tmp_path / "out.npy"
    write(query)
    assert main([*UNREACHABLE, "attend", "--model", "m", "--query", str(query), "--out", str(out)]) == 1
    assert words in capsys.readouterr().err
    assert not out.exists()


def test_a_plot_without_matplotlib_names_the_extra_and_asks_no_server():
    arguments = [*UNREACHABLE, "weights", "--model", "m", "--text", "a", "--plot", "a.png"]
    hidden = "import sys; sys.modules['matplotlib'] = None; from attention_client.cli import main"
    done = python("-c", f"{hidden}; sys.exit(main({arguments}))")
    assert done.returncode == 1
    assert done.stderr == "error: --plot needs matplotlib: pip install matplotlib\n"


def test_runs_as_a_module():
    done = python("-m", "attention_client", "--help")
    assert done.returncode == 0
    assert "HOST:PORT" in done.stdout

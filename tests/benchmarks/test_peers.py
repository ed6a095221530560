import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnxruntime
import pytest

from benchmarks import peers
from benchmarks.peers import torchserve_handler, triton
from benchmarks.peers.launch import Command, Launch
from benchmarks.results import TORCHSERVE, TRITON, TRITON_CPP, TRITON_CPP_SINGLE
from benchmarks.workload import AttentionKind, Model

CROSS = Model(AttentionKind.CROSS, 64, 4)


@pytest.fixture
def launch(tmp_path: Path) -> Launch:
    site = tmp_path / "home/triton/lib/python3.11/site-packages"
    site.mkdir(parents=True)
    graph = tmp_path / "artifact/model.onnx"
    graph.parent.mkdir()
    graph.write_bytes(b"graph")
    (graph.parent / "weights.data").write_bytes(b"weights")
    folder = tmp_path / "work"
    folder.mkdir()
    return Launch(tmp_path / "home", graph, CROSS, folder, 20000)


def test_peers_that_are_not_installed_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(peers.HOME_VARIABLE, str(tmp_path))
    monkeypatch.delenv(triton.BACKENDS_VARIABLE, raising=False)

    assert peers.installed() == []
    assert peers.absent() == (TRITON, TRITON_CPP, TRITON_CPP_SINGLE, TORCHSERVE)
    assert peers.versions() == {}


def test_installed_peers_state_their_runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(peers.HOME_VARIABLE, str(tmp_path))
    (tmp_path / "triton/bin").mkdir(parents=True)
    (tmp_path / "triton/bin/python").touch()
    (tmp_path / "triton/lib/python3.11/site-packages/onnxruntime-1.2.3.dist-info").mkdir(parents=True)

    monkeypatch.delenv(triton.BACKENDS_VARIABLE, raising=False)
    assert [peer.name for peer in peers.installed()] == [TRITON]
    assert peers.versions() == {TRITON: "2.51, ONNX Runtime 1.2.3"}

    backend = backends_in(tmp_path, monkeypatch) / "onnxruntime"
    (library,) = (Path(onnxruntime.__file__).parent / "capi").glob("libonnxruntime.so.*")
    (backend / "libonnxruntime.so").symlink_to(library)
    runtime = f"2.51, ONNX Runtime {onnxruntime.__version__}"
    assert peers.versions() == {
        TRITON: "2.51, ONNX Runtime 1.2.3",
        TRITON_CPP: runtime,
        TRITON_CPP_SINGLE: runtime,
    }


def backends_in(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of Triton's own backends, that the user names."""
    (folder / "backends/onnxruntime").mkdir(parents=True)
    (folder / "backends/onnxruntime/libtriton_onnxruntime.so").touch()
    monkeypatch.setenv(triton.BACKENDS_VARIABLE, str(folder / "backends"))
    return folder / "backends"


@pytest.mark.parametrize(
    ("backend", "dims"),
    [
        (triton.python_backend, "-1, 64"),
        (triton.onnxruntime_backend, "-1, 64"),
        (triton.onnxruntime_backend_single_instance, "-1, -1, 64"),
    ],
)
def test_triton_receives_a_model_repository(
    launch: Launch,
    backend: Callable[[Launch], Command],
    dims: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = backends_in(tmp_path, monkeypatch)
    for _ in range(2):  # a second start replaces what the first one wrote
        command = backend(launch)
    model = launch.folder / "repository" / CROSS.name
    config = (model / "config.pbtxt").read_text()

    assert f"--model-repository={launch.folder / 'repository'}" in command.arguments
    assert "--grpc-port=20000" in command.arguments
    is_own = f"--backend-directory={folder}" in command.arguments
    assert is_own == (backend is not triton.python_backend)
    for name in ("query", "key"):
        assert f'input [ {{ name: "{name}" data_type: TYPE_FP32 dims: [ {dims} ] }} ]' in config
    assert (model / "1/model.onnx").read_bytes() == b"graph"
    assert (model / "1/weights.data").read_bytes() == b"weights"


def test_the_torchserve_handler_runs_equal_and_unequal_lengths(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    helper = onnx.helper
    shape = ["batch", "length", 4]
    info = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape) for name in ("query", "out")]
    node = helper.make_node("Neg", ["query"], ["out"])
    graph = helper.make_graph([node], "negate", info[:1], info[1:])
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8),
        tmp_path / "model.onnx",
    )

    context = SimpleNamespace(
        system_properties={"model_dir": str(tmp_path)}, manifest={"model": {"serializedFile": "model.onnx"}}
    )
    for lengths in ((3, 3), (2, 5)):
        arrays = [np.full((length, 4), length, np.float32) for length in lengths]
        found = torchserve_handler.handle([{"data": array.tobytes()} for array in arrays], context)
        assert found == [(-array).tobytes() for array in arrays]


def test_the_installer_fetches_and_compiles_no_sources() -> None:
    script = Path(peers.__file__).with_name("install.sh").read_text()
    assert not re.findall(r"^ *[^#\n]*(?:\bgit |c\+\+|\bcmake|curl|https?:)", script, re.MULTILINE)


def test_the_installer_refuses_an_unknown_peer(tmp_path: Path) -> None:
    script = Path(peers.__file__).with_name("install.sh")
    result = subprocess.run(
        [str(script), "nonsense"],
        env={**os.environ, "PEERS_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )

    assert result.returncode == 2
    assert "unknown peer: nonsense; choose of triton, torchserve and perf" in result.stderr

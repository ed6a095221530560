"""Sessions: providers, whether CUDA can be used, and the memory of runs."""

import dataclasses
import shutil
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from uuid import UUID

import onnxruntime
import pytest

from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.models.loading import ModelStore
from attention_serving.server.engine.models.repository import FailedModel
from attention_serving.server.engine.run import cuda, session
from attention_serving.server.engine.run.driver import Gpu, gpus, visible_devices
from attention_serving.server.engine.run.provider import RUNTIME_PROVIDERS, Device, Provider, ProviderError
from attention_serving.server.engine.run.session import SHAPE_OPERATORS, Session, host_operators
from tests.server.samples import CROSS, SELF
from tests.support.processes import run_python

WITHOUT_CUDA = pytest.mark.skipif(
    "CUDAExecutionProvider" in onnxruntime.get_available_providers(), reason="this runtime has CUDA"
)


def _find_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "find_device", lambda: Gpu("a device", "GPU-0"))
    monkeypatch.setattr(session, "_register_arena", lambda *_: None)


@WITHOUT_CUDA
def test_a_model_whose_provider_is_unavailable_fails_to_load(
    artifacts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the device is not found, or is found and the graph silently runs on the host."""
    store = ModelStore(artifacts, Device(Provider.CUDA))
    for reason in ("is built without CUDA; install onnxruntime-gpu", "CUDAExecutionProvider did not take"):
        model = store.load(SELF, "1")
        assert isinstance(model, FailedModel)
        assert reason in model.reason
        _find_a_device(monkeypatch)


def test_int8_is_refused_on_a_device_and_fp16_named(artifacts: Path, tmp_path: Path) -> None:
    shutil.copytree(artifacts / SELF, tmp_path / SELF)
    manifest = tmp_path / SELF / "1/manifest.json"
    manifest.write_text(manifest.read_text().replace('"precision": "fp32"', '"precision": "int8"'))
    model = ModelStore(tmp_path, Device(Provider.CUDA)).load(SELF, "1")
    assert isinstance(model, FailedModel)
    assert (model.is_transient, model.reason) == (
        False,
        "manifest.json: cuda has no kernels for int8, whose linear layers would run on the host; export it "
        "with --precision fp16",
    )


def test_runs_on_a_device_take_turns(artifacts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here the host takes the place of the device: another provider, the same turns."""
    on_device = dataclasses.replace(Provider.CPU.runtime, uses_host_cores=False)
    monkeypatch.setitem(RUNTIME_PROVIDERS, Provider.CUDA, on_device)
    _find_a_device(monkeypatch)
    graph, busy = artifacts / SELF / "1/model.onnx", threading.Lock()
    opened = [Session(graph, Device(Provider.CUDA)) for _ in range(2)]

    def run(*_: object) -> list[object]:
        assert busy.acquire(blocking=False)  # no other run is under way
        time.sleep(0.01)
        busy.release()
        return [None]

    for each in opened:
        monkeypatch.setattr(each, "_session", SimpleNamespace(run=run))
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda at: opened[at % 2].run({}), range(8)))


ON_HOST = "CPUExecutionProvider"


def test_operators_of_tensors_on_the_host_are_named_and_those_of_sizes_are_not(artifacts: Path) -> None:
    """What this runtime, which has the host only, assigned to it."""
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    graph = artifacts / CROSS / "1/model.lengths.onnx"
    loaded = onnxruntime.InferenceSession(graph, options, providers=[ON_HOST])
    assert host_operators(loaded, ON_HOST) == []
    found = host_operators(loaded, "CUDAExecutionProvider")
    kinds = {text.split()[0] for text in found}
    assert {"MatMul", "Attention"} <= kinds
    assert not kinds & set(SHAPE_OPERATORS)
    assert all(len(text.split()) == 2 for text in found)


# The arena belongs to the process.
ARENA = """
import sys
from pathlib import Path
import numpy as np
from attention_serving.server.engine.models.loading import load_model
from attention_serving.server.engine.run.provider import Device

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 >> 20

def run(rows):
    return model.sessions["plain"].run({"query": np.ones((1, rows, 4), np.float32)})["context_vectors"].shape

model = load_model(Path(sys.argv[1]), Device(threads=1, arena_bytes=400 << 20))
before = resident()
print(run(4096), resident() - before > 100)
model.shrink_arena()
print(resident() - before < 40)
try:
    run(8192)
except MemoryError:
    print("refused")
print(run(8))
"""


@pytest.mark.thorough
def test_the_arena_is_bounded_and_gives_memory_back(artifacts: Path, self_model: LoadedModel) -> None:
    """The scores of one sequence of 4,096 rows and two heads take 128 MiB."""
    done = run_python("-c", ARENA, artifacts / self_model.name / self_model.version)
    assert done.stdout.splitlines() == ["(1, 4096, 4) True", "True", "refused", "(1, 8, 4)"]


def test_the_probe_computes_on_every_provider(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here the host takes the place of the device: the same session, another provider."""
    monkeypatch.setattr(cuda, "CUDA", Provider.CPU.runtime)
    cuda._compute()


@WITHOUT_CUDA
def test_a_session_that_silently_runs_on_the_cpu_is_noticed() -> None:
    with pytest.raises(
        ProviderError, match=r"the libraries of CUDA do not load: .*; onnxruntime was built for CUDA"
    ):
        cuda._compute()


# Functions of the CUDA Driver API with its signatures, for two devices.
DRIVER = """
#include <string.h>
int cuInit(unsigned flags) { return flags ? 1 : INIT; }
int cuDeviceGetCount(int *count) { *count = COUNT; return 0; }
int cuDeviceGet(int *device, int ordinal) { *device = 100 + ordinal; return ordinal < COUNT ? 0 : 101; }
int cuDeviceGetName(char *name, int length, int device) {
    if (length < 16) return 1;
    strcpy(name, device == 100 ? "First" : "Second MIG 1g");
    return 0;
}
int cuDeviceGetUuid_v2(char *uuid, int device) { memset(uuid, device, 16); return 0; }
int cuGetErrorString(int error, const char **text) { *text = "no CUDA-capable device is detected"; return 0; }
"""


def build(folder: Path, *, count: int, init: int = 0) -> str:
    source, library = folder / "driver.c", folder / f"driver-{init}.so"
    source.write_text(DRIVER)
    options = [f"-DCOUNT={count}", f"-DINIT={init}", "-shared", "-fPIC"]
    subprocess.run(["cc", *options, source, "-o", library], check=True, timeout=60)  # noqa: S607 - from PATH
    return str(library)


@pytest.fixture
def two_devices(tmp_path: Path) -> str:
    """A library that does as a driver with two devices, whatever the environment says."""
    if shutil.which("cc") is None:
        pytest.skip("needs a C compiler")
    return build(tmp_path, count=2)


def test_the_devices_of_the_driver_are_found(two_devices: str) -> None:
    assert gpus(two_devices) == [
        Gpu("First", f"GPU-{UUID(bytes=bytes([100] * 16))}"),
        Gpu("Second MIG 1g", f"MIG-{UUID(bytes=bytes([101] * 16))}"),
    ]


@pytest.mark.parametrize(
    ("variable", "devices"),
    [
        (None, ["0", "1"]),
        ("3, 1", ["3", "1"]),
        ("GPU-5,2,9", ["GPU-5", "2"]),  # the driver counts two: it does not know the third
        ("MIG-a,MIG-b,MIG-c", ["MIG-a", "MIG-b", "MIG-c"]),  # of which it enumerates one
    ],
)
def test_each_device_has_a_value_that_leaves_it_alone(
    two_devices: str, variable: str | None, devices: list[str]
) -> None:
    environment = {} if variable is None else {"CUDA_VISIBLE_DEVICES": variable}
    assert visible_devices(two_devices, environment) == devices
    assert visible_devices("libabsent.so.1", environment) == []


def test_why_there_is_no_device(tmp_path: Path) -> None:
    with pytest.raises(ProviderError, match=r"driver is not installed, or not visible.*libabsent"):
        gpus("libabsent.so.1")
    if shutil.which("cc"):
        with pytest.raises(ProviderError, match="offers no device to this process; see CUDA_VISIBLE_DEVICES"):
            gpus(build(tmp_path, count=0))
        with pytest.raises(ProviderError, match="cuInit returned 100, no CUDA-capable device is detected"):
            gpus(build(tmp_path, count=1, init=100))

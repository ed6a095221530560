"""Sessions: providers, whether CUDA can be used, and the memory of runs."""

import ctypes
import dataclasses
import shutil
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from uuid import UUID

import numpy as np
import onnxruntime
import pytest

from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.models.loading import ModelStore
from attention_serving.server.engine.models.repository import FailedModel
from attention_serving.server.engine.run import cuda, driver, memory, session
from attention_serving.server.engine.run.driver import Gpu, gpus, visible_devices
from attention_serving.server.engine.run.memory import SlabPool
from attention_serving.server.engine.run.provider import RUNTIME_PROVIDERS, Device, Provider, ProviderError
from attention_serving.server.engine.run.session import SHAPE_OPERATORS, Session, host_operators
from tests.server.samples import CROSS, SELF, WIDTHS
from tests.support.processes import run_python

WITHOUT_CUDA = pytest.mark.skipif(
    "CUDAExecutionProvider" in onnxruntime.get_available_providers(), reason="this runtime has CUDA"
)


def _find_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "find_device", lambda: Gpu("a device", "GPU-0"))
    monkeypatch.setattr(driver, "synchronize", lambda: None)
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


def _take_for_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sessions on the device are on the host then."""
    on_device = dataclasses.replace(Provider.CPU.runtime, uses_host_cores=False)
    monkeypatch.setitem(RUNTIME_PROVIDERS, Provider.CUDA, on_device)
    _find_a_device(monkeypatch)


@pytest.mark.parametrize("overlaps", [False, True])
def test_runs_on_a_device_take_turns(
    artifacts: Path, monkeypatch: pytest.MonkeyPatch, *, overlaps: bool
) -> None:
    """Here the host takes the place of the device: another provider, the same turns."""
    _take_for_a_device(monkeypatch)
    graph, busy = artifacts / SELF / "1/model.onnx", threading.Lock()
    opened = [Session(graph, Device(Provider.CUDA, overlaps=overlaps)) for _ in range(2)]
    run = onnxruntime.InferenceSession.run_with_iobinding

    def run_alone(*arguments: Any) -> None:
        assert busy.acquire(blocking=False)  # no other run is under way
        run(*arguments)
        time.sleep(0.01)
        busy.release()

    monkeypatch.setattr(onnxruntime.InferenceSession, "run_with_iobinding", run_alone)
    query = {"query": np.ones((1, 3, WIDTHS["query"]), np.float32)}
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda at: opened[at % 2].run(query), range(8)))


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

model = load_model(Path(sys.argv[1]), Device(threads=1, arena_bytes=400 << 20, binds=bool(sys.argv[2:])))
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
@pytest.mark.parametrize("options", [[], ["bound"]], ids=["arrays", "slabs"])
def test_the_arena_is_bounded_and_gives_memory_back(
    artifacts: Path, self_model: LoadedModel, options: list[str]
) -> None:
    """The scores of one sequence of 4,096 rows and two heads take 128 MiB."""
    done = run_python("-c", ARENA, artifacts / self_model.name / self_model.version, *options)
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
static int depth;
int registered, synchronized;
int cuDevicePrimaryCtxRetain(size_t *context, int device) { *context = device; return 0; }
int cuCtxPushCurrent_v2(size_t context) { return context == 100 && depth++ == 0 ? 0 : 201; }
int cuCtxPopCurrent_v2(size_t *context) { *context = 100; return depth-- == 1 ? 0 : 201; }
int cuMemHostRegister_v2(void *address, size_t size, unsigned flags) {
    if (depth != 1 || flags != 1 || (size_t) address % 4096 || REFUSES) return 1;
    memset(address, 0, size);
    return registered++, 0;
}
int cuMemHostUnregister(void *address) { return depth == 1 ? registered--, 0 : 201; }
int cuCtxSynchronize(void) { return depth == 1 ? synchronized++, 0 : 201; }
int cuDeviceGetUuid_v2(char *uuid, int device) { memset(uuid, device, 16); return 0; }
int cuGetErrorString(int error, const char **text) { *text = "no CUDA-capable device is detected"; return 0; }
"""


def build(folder: Path, *, count: int, init: int = 0, refuses: bool = False) -> str:
    source, library = folder / "driver.c", folder / f"driver-{init}.so"
    source.write_text(DRIVER)
    options = [f"-DCOUNT={count}", f"-DINIT={init}", f"-DREFUSES={refuses:d}", "-shared", "-fPIC"]
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


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
@pytest.mark.parametrize("refuses", [False, True])
def test_slabs_are_registered_with_the_driver_which_runs_wait_for(
    artifacts: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    *,
    refuses: bool,
) -> None:
    """Here the host takes the place of the device, and a library that of its driver."""
    synchronize = driver.synchronize
    _take_for_a_device(monkeypatch)
    monkeypatch.setattr(driver, "synchronize", synchronize)
    monkeypatch.setattr(driver, "LIBRARY", library := build(tmp_path, count=2, refuses=refuses))
    monkeypatch.setattr(memory, "STALE_SECONDS", 0)
    pool = SlabPool(1 << 12, driver, least_bytes=1)
    monkeypatch.setattr(session, "slab_pool", lambda _: pool)
    opened = Session(artifacts / SELF / "1/model.onnx", Device(Provider.CUDA))
    for rows in (3, 3, 100):  # the last leaves no room for the first slabs
        query = opened.empty((1, rows, WIDTHS["query"]), np.float32)
        query[:] = 1
        assert opened.run({"query": query})["context_vectors"].shape == query.shape
        del query
    assert pool.created == 4
    registered, synchronized = (
        ctypes.c_int.in_dll(ctypes.CDLL(library), name).value for name in ("registered", "synchronized")
    )
    assert (registered, synchronized) == (0 if refuses else 2, 6)
    assert [record.message for record in caplog.records] == ["host memory not registered"] * refuses

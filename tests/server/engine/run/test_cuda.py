"""Whether CUDA can be used, and if not, why. This machine's runtime has no CUDA, unless a test says so."""

import shutil
import subprocess
from pathlib import Path

import onnxruntime
import pytest

from attention_serving.server.engine.run import cuda
from attention_serving.server.engine.run.cuda import ask_driver
from attention_serving.server.engine.run.provider import Provider, ProviderError

WITHOUT_CUDA = pytest.mark.skipif(
    "CUDAExecutionProvider" in onnxruntime.get_available_providers(), reason="this runtime has CUDA"
)


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
    strcpy(name, device == 100 ? "First" : "Second");
    return 0;
}
int cuGetErrorString(int error, const char **text) { *text = "no CUDA-capable device is detected"; return 0; }
"""


def build(folder: Path, *, count: int, init: int = 0) -> str:
    source, library = folder / "driver.c", folder / f"driver-{init}.so"
    source.write_text(DRIVER)
    options = [f"-DCOUNT={count}", f"-DINIT={init}", "-shared", "-fPIC"]
    subprocess.run(["cc", *options, source, "-o", library], check=True, timeout=60)  # noqa: S607 - from PATH
    return str(library)


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_the_first_device_of_the_driver_is_found(tmp_path: Path) -> None:
    assert ask_driver(build(tmp_path, count=2)) == "First"


def test_why_there_is_no_device(tmp_path: Path) -> None:
    with pytest.raises(ProviderError, match=r"driver is not installed, or not visible.*libabsent"):
        ask_driver("libabsent.so.1")
    if shutil.which("cc"):
        with pytest.raises(ProviderError, match="offers no device to this process; see CUDA_VISIBLE_DEVICES"):
            ask_driver(build(tmp_path, count=0))
        with pytest.raises(ProviderError, match="cuInit returned 100, no CUDA-capable device is detected"):
            ask_driver(build(tmp_path, count=1, init=100))

"""What NVIDIA's driver is asked, in the types that its API takes. The driver is a library built for this.

The real one needs a device; `python -m benchmarks.cuda` asks it.
"""

import shutil
import subprocess
from pathlib import Path

import pytest

from attention_serving.server.engine.run.cuda import CudaDevice, ask_driver
from attention_serving.server.engine.run.provider import ProviderError

# Functions of the CUDA Driver API with its signatures, for devices of 80 and 81 GB.
DRIVER = """
#include <stddef.h>
#include <string.h>
int cuInit(unsigned flags) { return flags ? 1 : INIT; }
int cuDeviceGetCount(int *count) { *count = COUNT; return 0; }
int cuDeviceGet(int *device, int ordinal) { *device = 100 + ordinal; return ordinal < COUNT ? 0 : 101; }
int cuDeviceGetName(char *name, int length, int device) {
    if (length < 16) return 1;
    strcpy(name, device == 100 ? "First" : "Second");
    return 0;
}
int cuDeviceTotalMem_v2(size_t *bytes, int device) { *bytes = (size_t)(device - 20) * 1000000000; return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) {
    *value = attribute == 75 ? 9 : attribute == 76 ? device - 100 : -1;
    return 0;
}
int cuGetErrorString(int error, const char **text) { *text = "no CUDA-capable device is detected"; return 0; }
"""
WITH_COMPILER = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")


def build(folder: Path, *, count: int, init: int = 0) -> str:
    source, library = folder / "driver.c", folder / "driver.so"
    source.write_text(DRIVER)
    options = [f"-DCOUNT={count}", f"-DINIT={init}", "-shared", "-fPIC"]
    subprocess.run(["cc", *options, source, "-o", library], check=True, timeout=60)  # noqa: S607 - from PATH
    return str(library)


@WITH_COMPILER
def test_the_first_device_is_found(tmp_path: Path) -> None:
    assert ask_driver(build(tmp_path, count=2)) == CudaDevice("First", 80_000_000_000, "9.0")


@WITH_COMPILER
def test_a_driver_without_a_device_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ProviderError, match="offers no device to this process; see CUDA_VISIBLE_DEVICES"):
        ask_driver(build(tmp_path, count=0))


@WITH_COMPILER
def test_the_error_of_the_driver_is_the_reason(tmp_path: Path) -> None:
    expected = "cuInit returned 100, no CUDA-capable device is detected"
    with pytest.raises(ProviderError, match=expected):
        ask_driver(build(tmp_path, count=1, init=100))


def test_without_a_driver_the_name_of_its_library_is_in_the_reason() -> None:
    with pytest.raises(ProviderError, match=r"driver is not installed, or not visible.*libabsent"):
        ask_driver("libabsent.so.1")

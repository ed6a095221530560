"""Regions of shared memory: what is registered, what is refused, and files that change under the server."""

import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from attention_serving.protos.inference import open_inference_pb2 as pb
from attention_serving.server.api import shared_memory
from attention_serving.server.api.shared_memory import FOLDER, SharedMemory
from attention_serving.server.engine.errors import (
    InvalidRequestError,
    LimitExceededError,
    RegionNotFoundError,
    UnsupportedError,
)
from tests.server.api.messages import decode_inputs

SIZE = 4096


@pytest.fixture
def file() -> Iterator[Path]:
    path = FOLDER / f"test-{secrets.token_hex(6)}"
    path.write_bytes(bytes(range(256)) * (SIZE // 256))
    yield path
    path.unlink(missing_ok=True)


@pytest.fixture
def memory(file: Path) -> SharedMemory:
    memory = SharedMemory()
    memory.register("r", file.name, 256, 1024)
    return memory


def open_files() -> int:
    """Open files of shared memory: threads of other tests may open and close other files meanwhile."""
    opened = 0
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # closed meanwhile
            opened += str(entry.readlink()).startswith((str(FOLDER), "/etc/hostname"))
    return opened


def test_a_region_is_read_and_written_where_it_lies(memory: SharedMemory, file: Path) -> None:
    region = memory.find("query", "r")
    assert region.read("query", 3, 5) == bytes([3, 4, 5, 6, 7])
    region.write("out", 1020, [b"ab", np.array([7, 8], np.uint8).data])
    parts = [bytes([index % 251]) for index in range(1000)]
    region.write("out", 10, parts)  # in more than one system call
    assert file.read_bytes()[266:1266] == b"".join(parts)
    assert file.read_bytes()[256 + 1020 : 256 + 1025] == b"ab" + bytes([7, 8, 0])
    assert file.stat().st_size == SIZE


@pytest.mark.parametrize(
    ("offset", "size"), [(0, 1025), (1024, 1), (1025, 0), (2**63, 8), (8, 2**64)], ids=str
)
def test_what_is_outside_the_region_is_refused(memory: SharedMemory, offset: int, size: int) -> None:
    region = memory.find("query", "r")
    with pytest.raises(InvalidRequestError, match="are not in region 'r' of 1024 bytes"):
        region.read("query", offset, size)
    with pytest.raises(InvalidRequestError, match="are not in region 'r' of 1024 bytes"):
        region.check_write("out", offset, size, 1)
    with pytest.raises(InvalidRequestError, match="has 9 bytes; the request sets 8 bytes aside"):
        region.check_write("out", 0, 8, 9)


def test_a_file_that_becomes_smaller_is_an_error_of_the_request(memory: SharedMemory, file: Path) -> None:
    region = memory.find("query", "r")
    os.truncate(file, 300)
    with pytest.raises(InvalidRequestError, match="shared memory 'r' has become smaller"):
        region.read("query", 0, 1024)
    with pytest.raises(InvalidRequestError, match="shared memory 'r' has become smaller"):
        region.write("out", 0, [bytes(1024)])
    assert file.stat().st_size == 300


def test_a_region_in_use_outlives_its_registration(memory: SharedMemory) -> None:
    before = open_files()
    region = memory.find("query", "r")
    memory.unregister("r")
    assert region.read("query", 0, 1) == b"\0"
    with pytest.raises(RegionNotFoundError, match="query: shared memory 'r' is not registered"):
        memory.find("query", "r")
    del region
    assert open_files() == before - 1


def foreign(path: Path) -> None:
    os.chown(path, 12345, 12345)


def linked(path: Path) -> None:
    path.unlink()
    path.symlink_to("/etc/hostname")


def piped(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize("change", [foreign, linked, piped, Path.unlink])
def test_what_is_not_shared_memory_of_this_user_is_refused(
    file: Path, change: Callable[[Path], object]
) -> None:
    if change is foreign and os.geteuid() != 0:
        pytest.skip("only root can give a file to another user")
    before = open_files()
    change(file)
    with pytest.raises(InvalidRequestError) as caught:
        SharedMemory().register("r", file.name, 0, 1)
    assert caught.value.field == "key"
    assert open_files() == before


KEYS = ("", "/", "..", "/../etc/passwd", "a/b", ".hidden", "a\0b", "x" * 300, "//a")
# Name, key, offset and size; None is the key of the file.
REFUSED: list[tuple[str, str | None, int, int, str]] = [
    *[("s", key, 0, 1, "is not a name such as /vectors") for key in KEYS],
    *[("s", None, *place, f"which has {SIZE} bytes") for place in ((0, SIZE + 1), (SIZE, 1), (1, 2**64 - 1))],
    ("r", None, 0, 1, "'r' is registered already"),
    ("", None, 0, 1, "must have 1 to 256 characters"),
    ("n" * 257, None, 0, 1, "must have 1 to 256 characters"),
    ("s", None, 0, 0, "must be at least 1"),
]


@pytest.mark.parametrize(("name", "key", "offset", "size", "says"), REFUSED)
def test_a_region_has_a_name_of_its_own_and_lies_in_a_file(
    memory: SharedMemory, file: Path, name: str, key: str | None, offset: int, size: int, says: str
) -> None:
    before = open_files()
    with pytest.raises(InvalidRequestError, match=says):
        memory.register(name, file.name if key is None else key, offset, size)
    assert open_files() == before


def test_regions_are_few(memory: SharedMemory, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "MAX_REGIONS", 2)
    memory.register("s", f"/{file.name}", 0, 1)
    with pytest.raises(LimitExceededError, match="2 regions are registered"):
        memory.register("t", file.name, 0, 1)
    memory.unregister()
    assert memory.regions() == []


def shared_request(region: str, size: int) -> pb.ModelInferRequest:
    message = pb.ModelInferRequest(model_name="m")
    for name, shape in (("query", [2, 3]), ("key", [1])):
        message.inputs.add(name=name, datatype="FP32", shape=shape)
    parameters = message.inputs[0].parameters
    parameters["shared_memory_region"].string_param = region
    parameters["shared_memory_byte_size"].int64_param = size
    parameters["shared_memory_offset"].int64_param = 16
    message.raw_input_contents.append(np.float32(5).tobytes())
    return message


def test_raw_contents_belong_to_the_inputs_that_are_not_shared(memory: SharedMemory) -> None:
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    memory.find("query", "r").write("query", 16, [values.data])
    found = decode_inputs(shared_request("r", 24), memory=memory)
    np.testing.assert_array_equal(found["query"], values)
    assert found["key"] == [5]


def test_a_tensor_in_shared_memory_is_refused_with_its_reason(memory: SharedMemory) -> None:
    with pytest.raises(UnsupportedError, match="switched off; start the server with --allow-shared-memory"):
        decode_inputs(shared_request("r", 24))
    for region, size, error, says in (
        ("other", 24, RegionNotFoundError, "query: shared memory 'other' is not registered"),
        ("", 24, InvalidRequestError, r"shared_memory_region\]: must be the name of a region"),
        ("r", 20, InvalidRequestError, "query: has 20 bytes; 2 x 3 elements"),
        ("r", -1, InvalidRequestError, r"shared_memory_byte_size\]: must be a number of bytes"),
    ):
        with pytest.raises(error, match=says):
            decode_inputs(shared_request(region, size), memory=memory)
    extra = shared_request("r", 24)
    extra.raw_input_contents.append(b"")
    with pytest.raises(InvalidRequestError, match="2 entries; the request has 1 inputs outside shared"):
        decode_inputs(extra, memory=memory)

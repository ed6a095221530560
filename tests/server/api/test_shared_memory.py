"""Regions of shared memory: what is registered, what is refused, and files that change under the server."""

import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from attention_serving.protos.inference import open_inference_pb2 as pb
from attention_serving.server.api import shared_memory
from attention_serving.server.api.shared_memory import FOLDER, SharedMemory
from attention_serving.server.engine.errors import (
    EngineError,
    InvalidRequestError,
    LimitExceededError,
    RegionNotFoundError,
    UnsupportedError,
)
from attention_serving.server.engine.model import LoadedModel
from tests.server.api.messages import decode_infer, decode_inputs, raw_request
from tests.support.refusals import expect_refusal

SIZE = 4096


@pytest.fixture
def file() -> Iterator[Path]:
    path = FOLDER / f"test-{secrets.token_hex(6)}"
    path.write_bytes(bytes(range(256)) * (SIZE // 256))
    yield path
    path.unlink(missing_ok=True)


@pytest.fixture
def memory(file: Path) -> SharedMemory:
    memory = SharedMemory(is_on=True)
    memory.register("r", file.name, 256, 1024)
    return memory


def open_files() -> int:
    """Open files of shared memory: threads of other tests may open and close other files meanwhile."""
    opened = 0
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # closed meanwhile
            opened += str(entry.readlink()).startswith((str(FOLDER), "/etc/hostname"))
    return opened


def test_a_tensor_is_read_and_written_where_it_lies(memory: SharedMemory, file: Path) -> None:
    assert memory.slice("query", "r", 3, 5).read() == bytes([3, 4, 5, 6, 7])
    place = memory.slice("out", "r", 1020, 4).shorten(3)
    place.write([b"a", np.array([[7], [8]], np.uint8)])
    assert file.read_bytes()[256 + 1019 : 256 + 1024] == bytes([251, ord("a"), 7, 8, 255])
    with pytest.raises(InvalidRequestError, match="out: has 4 bytes; the request sets 3 bytes aside for it"):
        place.shorten(4)
    with pytest.raises(EngineError, match="out: has 4 bytes, which are not those of its shape"):
        place.write([bytes(4)])
    assert file.read_bytes()[256 + 1019 : 256 + 1024] == bytes([251, ord("a"), 7, 8, 255])


@pytest.mark.parametrize(
    ("offset", "size"), [(0, 1025), (1024, 1), (1025, 0), (-1, 8), (8, -1), (2**63, 8), (8, 2**64)], ids=str
)
def test_what_is_outside_the_region_is_refused(memory: SharedMemory, offset: int, size: int) -> None:
    with pytest.raises(InvalidRequestError, match="are not in region 'r' of 1024 bytes"):
        memory.slice("query", "r", offset, size)


def test_a_file_that_becomes_smaller_is_an_error_of_the_request(memory: SharedMemory, file: Path) -> None:
    place = memory.slice("query", "r", 0, 1024)
    os.truncate(file, 300)
    for use in (place.read, lambda: place.write([bytes(1024)])):
        with pytest.raises(InvalidRequestError, match="query: shared memory 'r' has become smaller"):
            use()
    assert file.stat().st_size == 300


def test_a_region_in_use_outlives_its_registration(memory: SharedMemory) -> None:
    before, place = open_files(), memory.slice("query", "r", 0, 1)
    memory.unregister("r")
    assert place.read() == b"\0"
    with pytest.raises(RegionNotFoundError, match="query: shared memory 'r' is not registered"):
        memory.slice("query", "r", 0, 1)
    del place
    assert open_files() == before - 1


def foreign(path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a file to another user")
    os.chown(path, 12345, 12345)


def linked(path: Path) -> None:
    path.unlink()
    path.symlink_to("/etc/hostname")


def piped(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize("change", [foreign, linked, piped, Path.unlink])
def test_what_another_user_may_own_is_refused(file: Path, change: Callable[[Path], object]) -> None:

    before = open_files()
    change(file)
    with expect_refusal("key: "):
        SharedMemory(is_on=True).register("r", file.name, 0, 1)
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
    with pytest.raises(InvalidRequestError, match=says):
        memory.register(name, file.name if key is None else key, offset, size)


def test_regions_are_few(memory: SharedMemory, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "MAX_REGIONS", 2)
    memory.register("s", f"/{file.name}", 0, 1)
    with pytest.raises(LimitExceededError, match="2 regions are registered"):
        memory.register("t", file.name, 0, 1)
    memory.unregister("")
    assert memory.regions("") == []


def shared_request(region: str = "r", **size: Any) -> pb.ModelInferRequest:
    message = pb.ModelInferRequest(model_name="m")
    for name, shape in (("query", [2, 3]), ("key", [1])):
        message.inputs.add(name=name, datatype="FP32", shape=shape)
    parameters = message.inputs[0].parameters
    parameters["shared_memory_region"].string_param = region
    parameters["shared_memory_byte_size"].CopyFrom(pb.InferParameter(**(size or {"int64_param": 24})))
    parameters["shared_memory_offset"].int64_param = 16
    message.raw_input_contents.append(np.float32(5).tobytes())
    return message


def test_raw_contents_belong_to_the_inputs_that_are_not_shared(memory: SharedMemory) -> None:
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    memory.slice("query", "r", 16, 24).write([values])
    found = decode_inputs(shared_request(), memory)
    np.testing.assert_array_equal(found["query"], values)
    assert found["key"] == [5]
    extra = shared_request()
    extra.raw_input_contents.append(b"")
    with pytest.raises(InvalidRequestError, match="2 entries; the request has 1 inputs outside shared"):
        decode_inputs(extra, memory)


def test_an_input_in_shared_memory_is_refused_with_its_reason(memory: SharedMemory) -> None:
    with pytest.raises(UnsupportedError, match="switched off; start the server with --allow-shared-memory"):
        decode_inputs(shared_request())
    for message, error, says in (
        (shared_request("other"), RegionNotFoundError, "query: shared memory 'other' is not registered"),
        (shared_request(int64_param=20), InvalidRequestError, "query: has 20 bytes; 2 x 3 elements"),
        (shared_request(double_param=24), InvalidRequestError, r"byte_size\]: must be a number of bytes"),
    ):
        with pytest.raises(error, match=says):
            decode_inputs(message, memory)


def test_an_output_that_does_not_fit_is_refused(memory: SharedMemory, self_model: LoadedModel) -> None:
    message = raw_request(self_model, {"query": np.zeros((2, 3, 4), np.float32)}, ["context_vectors"])
    message.outputs[0].parameters["shared_memory_region"].string_param = "r"
    with expect_refusal("outputs[context_vectors]: has 96 bytes; the"):
        decode_infer(message, self_model, memory=memory)

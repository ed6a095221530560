"""Booleans are 0 or 1 on every way in: the runtime would compute with other bytes as if they were numbers."""

import secrets
from collections.abc import Callable, Iterator
from math import inf
from typing import Any

import numpy as np
import pytest
import torch
from google.protobuf.message import Message
from torch import nn

from attention_serving.export import export_module
from attention_serving.protos.attention.v1 import attention_pb2 as typed
from attention_serving.protos.inference import open_inference_pb2 as pb
from attention_serving.server.api.attention.service import Attend
from attention_serving.server.api.codec_threads import CodecThreads
from attention_serving.server.api.open_inference.codec import decode
from attention_serving.server.api.open_inference.service import ModelInfer
from attention_serving.server.api.shared_memory import FOLDER, SharedMemory
from attention_serving.server.engine.budget import MemoryBudget
from attention_serving.server.engine.engine import Engine
from attention_serving.server.engine.errors import InvalidRequestError
from attention_serving.server.engine.limits import MIB
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.models.loading import load_model
from attention_serving.server.engine.models.repository import Repository
from attention_serving.server.engine.run.provider import Device
from attention_serving.server.engine.types import Array
from attention_serving.server.http import infer as http
from tests.server.api.calls.scripted import ScriptedCall
from tests.server.api.messages import decode_infer, raw_request, read_infer
from tests.server.http.clients import binary_body
from tests.server.samples import CROSS, HEADS, SELF, WIDTHS
from tests.support.coroutines import run

BATCH, ROWS = 2, 4
SAYS = "contains the byte 2; a boolean must be 0 or 1"
FLAGS = np.array([[1, 1, 0, 0], [1, 0, 1, 0]], np.uint8)
SHAPES = {
    "keys": (BATCH, ROWS),
    "pairs": (BATCH, ROWS, ROWS),
    "one head": (BATCH, 1, ROWS, ROWS),
    "heads": (BATCH, HEADS, ROWS, ROWS),
}


class Gate(nn.Module):
    """Keeps the rows whose flag is set."""

    def forward(self, query: torch.Tensor, flags: torch.Tensor) -> torch.Tensor:
        return query * flags.to(query.dtype)


@pytest.fixture(scope="module")
def gate(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """A module with an input of booleans."""
    folder = tmp_path_factory.mktemp("gate")
    example = (torch.zeros(2, 3, 4), torch.ones(2, 3, 1, dtype=torch.bool))
    axes = {"query": {0: "batch", 1: "sequence"}, "flags": {0: "batch", 1: "sequence"}}
    export_module(Gate().eval(), example, axes, out=folder, name="gate")
    return load_model(folder / "gate" / "1", Device(threads=1))


@pytest.fixture(scope="module")
def engine(gate: LoadedModel) -> Iterator[Engine]:
    engine = Engine(Repository([gate]))
    yield engine
    engine.close()


def request(model: LoadedModel, mask: Array, *outputs: str) -> pb.ModelInferRequest:
    """A request in raw contents, of which the mask is the last."""
    tensors: dict[str, Array] = {
        spec.name: np.ones((BATCH, ROWS, WIDTHS[spec.name]), np.float32) for spec in model.inputs
    }
    return raw_request(model, {**tensors, "attention_mask": mask}, outputs)


def in_raw_contents(message: pb.ModelInferRequest, _memory: SharedMemory) -> pb.ModelInferRequest:
    return message


def in_shared_memory(message: pb.ModelInferRequest, memory: SharedMemory) -> pb.ModelInferRequest:
    data, mask = message.raw_input_contents.pop(), message.inputs[-1]
    memory.find("r", "r").write("r", 0, [data])
    mask.parameters["shared_memory_region"].string_param = "r"
    mask.parameters["shared_memory_byte_size"].int64_param = len(data)
    return message


def in_binary_http(message: pb.ModelInferRequest, _memory: SharedMemory) -> pb.ModelInferRequest:
    inputs = [
        {
            "name": own.name,
            "datatype": own.datatype,
            "shape": list(own.shape),
            "parameters": {"binary_data_size": len(data)},
        }
        for own, data in zip(message.inputs, message.raw_input_contents, strict=True)
    ]
    body, headers = binary_body({"inputs": inputs}, *message.raw_input_contents)
    (size,) = map(int, headers.values())
    reservation = MemoryBudget(MIB).reserve(0)
    decoded, _ = http.decode(bytearray(body), size, message.model_name, "", MIB, reservation)
    return pb.ModelInferRequest.FromString(decoded)


@pytest.fixture
def memory() -> Iterator[SharedMemory]:
    path = FOLDER / f"test-{secrets.token_hex(6)}"
    path.write_bytes(bytes(4096))
    memory = SharedMemory()
    memory.register("r", path.name, 0, 4096)
    yield memory
    path.unlink()


@pytest.mark.parametrize("output", ["context_vectors", "attention_weights"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("name", [SELF, CROSS])
@pytest.mark.parametrize("way", [in_raw_contents, in_shared_memory, in_binary_http])
def test_a_mask_of_other_bytes_is_refused(
    models: dict[str, LoadedModel],
    memory: SharedMemory,
    way: Callable[[pb.ModelInferRequest, SharedMemory], pb.ModelInferRequest],
    name: str,
    shape: tuple[int, ...],
    output: str,
) -> None:
    model = models[name]
    mask = np.resize(FLAGS, shape)
    good = way(request(model, mask.view(np.bool_), output), memory)
    found = decode_infer(good, model, memory=memory)[0].mask
    assert found is not None
    np.testing.assert_array_equal(found.data.view(np.uint8), mask.ravel())
    with pytest.raises(InvalidRequestError) as caught:
        decode_infer(way(request(model, (2 * mask).view(np.bool_), output), memory), model, memory=memory)
    assert (caught.value.field, caught.value.message) == ("attention_mask", f"attention_mask: {SAYS}")


def test_a_typed_boolean_beyond_one_is_true(self_model: LoadedModel) -> None:
    """On the wire, a boolean of protobuf is a number, which the library reads as true unless it is 0."""
    message = pb.ModelInferRequest(model_name=SELF)
    query = message.inputs.add(name="query", datatype="FP32", shape=[1, ROWS, 4])
    query.contents.fp32_contents.extend([1.0] * 4 * ROWS)
    mask = message.inputs.add(name="attention_mask", datatype="BOOL", shape=[1, ROWS])
    mask.contents.bool_contents.extend([True, True, False, False])
    expected = message.SerializeToString()
    data = expected.replace(b"\x0a\x04\1\1\0\0", b"\x0a\x04\2\2\0\0")
    assert data != expected
    flags = []
    for each in (expected, data):
        found = decode(read_infer(each), self_model, inf)[0].mask
        assert found is not None
        flags.append(found.data.tobytes())
    assert flags == [b"\1\1\0\0"] * 2


def gate_request(flags: bytes) -> pb.ModelInferRequest:
    message = pb.ModelInferRequest(model_name="gate")
    message.inputs.add(name="query", datatype="FP32", shape=[1, ROWS, 4])
    message.inputs.add(name="flags", datatype="BOOL", shape=[1, ROWS, 1])
    message.raw_input_contents.extend([np.ones((ROWS, 4), np.float32).tobytes(), flags])
    return message


def gate_vectors(flags: bytes) -> typed.AttendRequest:
    ones = np.ones((ROWS, 4), np.float32).tobytes()
    return typed.AttendRequest(
        model_name="gate",
        query=typed.VectorSequences(data_type=typed.DATA_TYPE_FP32, width=4, lengths=[ROWS], data=ones),
        key=typed.VectorSequences(data_type=typed.DATA_TYPE_BOOL, width=1, lengths=[ROWS], data=flags),
    )


@pytest.mark.parametrize("protocol", ["open inference", "attention.v1"])
def test_a_boolean_input_of_other_bytes_is_refused_after_an_equal_request(
    engine: Engine, threads: CodecThreads, protocol: str
) -> None:
    """A request that was answered is recognised by the bytes around its tensors, but not with booleans."""
    field = "flags"
    build: Callable[[bytes], Message] = gate_request
    handle: Callable[..., Any] = ModelInfer(engine, threads).handle
    if protocol == "attention.v1":
        build, field = gate_vectors, "key.data"
        handle = Attend(engine, threads).handle

    def answer(flags: bytes) -> bytes:
        data = build(flags).SerializeToString()
        reply: bytes = run(handle(data, ScriptedCall(inf), MemoryBudget(MIB).reserve(len(data))))
        return reply

    reply = answer(b"\1\1\0\0")
    if protocol == "attention.v1":
        content = typed.AttendResponse.FromString(reply).context_vectors.data
    else:
        (content,) = pb.ModelInferResponse.FromString(reply).raw_output_contents
    rows = np.frombuffer(content, np.float32).reshape(ROWS, 4)
    np.testing.assert_array_equal(rows, np.repeat([[1.0], [1.0], [0.0], [0.0]], 4, axis=1))
    with pytest.raises(InvalidRequestError) as caught:
        answer(b"\2\2\0\0")
    assert (caught.value.field, caught.value.message) == (field, f"{field}: {SAYS}")

"""Messages that are as large or as expensive as the transport permits, beside small good requests.

tests/server/api has the refusals. This measures what such a message costs a server and its other callers.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from attention_serving.protos.attention.v1 import attention_pb2 as typed
from attention_serving.protos.attention.v1.attention_pb2_grpc import AttentionServiceStub
from attention_serving.protos.inference import open_inference_pb2 as pb
from attention_serving.server.api.protobuf_bytes import field
from scripts.local_server import ServerProcess
from tests.chaos.figures import Figures
from tests.chaos.process import MIB, OWN_CONNECTION, readings, reset_peak, server_of
from tests.server.api.messages import attend_request
from tests.server.samples import SELF, TEXT

pytestmark = pytest.mark.chaos
INFER = "/inference.GRPCInferenceService/ModelInfer"
ATTEND = "/attention.v1.AttentionService/Attend"
READY = "/inference.GRPCInferenceService/ModelReady"
REFUSED, INVALID, ANSWERED = "INVALID_ARGUMENT LIMIT_EXCEEDED", "INVALID_ARGUMENT INVALID_FIELD", "OK"
INPUTS, INT64_CONTENTS, RAW = 5, 3, 7
PATIENCE_SECONDS = 120.0
REPEATS = 3
# Beyond the delay of receiving a message of 60 MiB.
MAX_DELAY_SECONDS = 0.1
# What a message of any size may take: a tokenizer needs 40 times the memory of one text of at most 1 MiB.
MAX_MEMORY_RATIO, MIN_MEMORY_BYTES = 4, 64 * MIB


def packed(path: tuple[int, ...], content: bytes) -> bytes:
    return b"".join(field(path, [content]))


def texts(*texts: str) -> bytes:
    return typed.AttendRequest(model_name=TEXT, text=typed.TextSequences(texts=texts)).SerializeToString()


def infer(model: str, name: str, datatype: str, shape: list[int]) -> bytes:
    message = pb.ModelInferRequest(model_name=model)
    message.inputs.add(name=name, datatype=datatype, shape=shape)
    return message.SerializeToString()


def ones_as_int64() -> bytes:
    tensor = pb.ModelInferRequest.InferInputTensor(name="query", datatype="INT64", shape=[62 * MIB])
    numbers = packed((5, INT64_CONTENTS), b"\1" * (62 * MIB))
    of_self = pb.ModelInferRequest(model_name=SELF).SerializeToString()
    return of_self + packed((INPUTS,), tensor.SerializeToString() + numbers)


def rows(count: int, length: int, **content: Any) -> bytes:
    query = typed.VectorSequences(
        data_type=typed.DATA_TYPE_FP32, width=4, lengths=[length] * count, data=bytes(16 * count * length)
    )
    return typed.AttendRequest(model_name=SELF, query=query, **content).SerializeToString()


def flags() -> bytes:
    return rows(1, 2, mask=typed.AttentionMask(kind=typed.AttentionMask.KIND_PAIRS, bits=bytes(60 * MIB)))


class Hostile(NamedTuple):
    """A message: the full name of its method, what makes it, and how it is answered."""

    method: str
    build: Callable[[], bytes]
    answer: str


HOSTILE = {
    "60 MB to a method of names": Hostile(READY, lambda: packed((15,), bytes(60 * MIB)), REFUSED),
    "60 MB of known words": Hostile(ATTEND, lambda: texts(*["Life is " * (MIB // 8 - 8)] * 60), REFUSED),
    "one word of 1 MB": Hostile(ATTEND, lambda: texts("x" * (MIB - 8)), INVALID),
    "BYTES of 15 M empty elements": Hostile(
        INFER,
        lambda: infer(TEXT, "text", "BYTES", [15_000_000]) + packed((RAW,), bytes(60_000_000)),
        REFUSED,
    ),
    "64 M ones as INT64": Hostile(INFER, ones_as_int64, REFUSED),
    "300 k inputs": Hostile(
        INFER, lambda: infer(SELF, "query", "FP32", [1]) + packed((INPUTS,), b"\x0a\x01a") * 300_000, REFUSED
    ),
    "20 M unknown fields": Hostile(INFER, lambda: b"\xf8\x7f\x01" * 20_000_000, REFUSED),
    "a shape of 60 M axes": Hostile(INFER, lambda: packed((INPUTS, 3), b"\1" * (60 * MIB)), REFUSED),
    "60 M ids": Hostile(ATTEND, lambda: texts() + packed((4, 2), b"\1" * (60 * MIB)), INVALID),
    "503 M flags of a mask": Hostile(ATTEND, flags, REFUSED),
}
FLOOR = next(iter(HOSTILE))
"""Refused by its size alone. grpcio copies a message twice before it hands it over, on the thread that takes
calls and with the interpreter's lock held: 90 ms for 64 MiB where memory is new, 30 ms where it is reused."""


@pytest.fixture(scope="module")
def hostile_server(artifacts: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with server_of(artifacts, tmp_path_factory.mktemp("hostile")) as process:
        yield process


def attack(target: str, name: str) -> tuple[str, int]:
    """Sends a message; returns status and reason, and the size of the message.

    Runs in a process of its own: the interpreter of this one must not delay the small requests.
    """
    message = HOSTILE[name].build()
    with grpc.insecure_channel(target, OWN_CONNECTION) as channel:
        send: Any = channel.unary_unary(HOSTILE[name].method)
        grpc.channel_ready_future(channel).result(PATIENCE_SECONDS)
        found = ANSWERED
        try:
            send(message, timeout=PATIENCE_SECONDS)
        except grpc.RpcError as caught:
            status, info = rpc_status.from_call(caught), error_details_pb2.ErrorInfo()  # type: ignore[arg-type]
            is_explained = status is not None and status.details and status.details[0].Unpack(info)
            error: Any = caught  # a call
            found = f"{error.code().name} {info.reason if is_explained else error.details()}"
        return found, len(message)


class Attacked(NamedTuple):
    """What one message did: outcome, bytes, delay of others in seconds, growth of the server in bytes."""

    outcome: str
    size: int
    delay: float
    grown: int


def attacked(server: ServerProcess, generator: ProcessPoolExecutor, name: str) -> Attacked:
    """Sends a message once, beside a small request every 10 ms on another connection."""
    seconds: list[float] = []
    with grpc.insecure_channel(server.target, OWN_CONNECTION) as other:
        small: Any = AttentionServiceStub(other).Attend
        small(attend_request([4]), timeout=PATIENCE_SECONDS)
        before = reset_peak(server.process.pid)
        attacking = generator.submit(attack, server.target, name)
        while not (seconds and attacking.done()):
            started = time.perf_counter()
            small(attend_request([4]), timeout=PATIENCE_SECONDS)
            seconds.append(time.perf_counter() - started)
            time.sleep(max(0.0, 0.01 - seconds[-1]))
    delay = max(seconds) - statistics.median(seconds)
    return Attacked(*attacking.result(), delay, readings(server.process.pid).peak - before)


def test_hostile_messages_are_answered_without_delay_or_memory(
    hostile_server: ServerProcess, generator: ProcessPoolExecutor
) -> None:
    floor = None
    with Figures("hostile messages") as figures:
        for name, hostile in HOSTILE.items():
            attacked(hostile_server, generator, name)  # the first message of a size makes the allocator grow
            found = [attacked(hostile_server, generator, name) for _ in range(REPEATS)]
            delay = statistics.median(one.delay for one in found)
            floor = delay if floor is None else floor
            size = found[0].size
            figures.equal(f"{name}: outcomes", {one.outcome for one in found}, {hostile.answer})
            figures.at_most(f"{name}: delay of others, s", delay, MAX_DELAY_SECONDS + floor)
            grown, bound = max(one.grown for one in found), max(MIN_MEMORY_BYTES, MAX_MEMORY_RATIO * size)
            figures.at_most(f"{name}: growth, MiB", grown / MIB, bound / MIB)

"""Messages that are as large or as expensive as the transport permits, beside small good requests.

tests/server/api has the refusals. This measures what such a message costs a server and its other callers.
"""

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from attention_serving.protos.attention.v1 import attention_pb2 as typed
from attention_serving.protos.attention.v1.attention_pb2_grpc import AttentionServiceStub
from attention_serving.protos.inference import open_inference_pb2 as pb
from attention_serving.server.api.wire import encode_field
from scripts.local_server import ServerProcess
from tests.chaos.figures import Figures
from tests.chaos.process import MIB, OWN_CONNECTION, readings, reset_peak, server_of
from tests.server.api.messages import attend_request
from tests.server.samples import SELF, TEXT
from tests.support.mutations import ATTEND, INFER

pytestmark = pytest.mark.chaos
READY = "/inference.GRPCInferenceService/ModelReady"
REFUSED, INVALID = "INVALID_ARGUMENT LIMIT_EXCEEDED", "INVALID_ARGUMENT INVALID_FIELD"
INPUTS, INT64_CONTENTS, RAW = 5, 3, 7
PATIENCE_SECONDS = 120.0
REPEATS = 3
# Beyond the delay of receiving a message of 60 MiB.
MAX_DELAY_SECONDS = 0.1
# What a message of any size may take: a tokenizer needs 40 times the memory of one text of at most 1 MiB.
MAX_MEMORY_RATIO, MIN_MEMORY_BYTES = 4, 64 * MIB


def packed(path: tuple[int, ...], content: bytes) -> bytes:
    return b"".join(encode_field(path, [content]))


def texts(*texts: str) -> bytes:
    return typed.AttendRequest(model_name=TEXT, text=typed.TextSequences(texts=texts)).SerializeToString()


def infer(model: str, name: str, datatype: str, shape: list[int]) -> bytes:
    message = pb.ModelInferRequest(model_name=model)
    message.inputs.add(name=name, datatype=datatype, shape=shape)
    return message.SerializeToString()


def ones_as_int64() -> bytes:
    numbers = packed((5, INT64_CONTENTS), b"\1" * (62 * MIB))
    tensor = pb.ModelInferRequest.InferInputTensor(name="query", datatype="INT64", shape=[62 * MIB])
    of_self = pb.ModelInferRequest(model_name=SELF).SerializeToString()
    return of_self + packed((INPUTS,), tensor.SerializeToString() + numbers)


def flags() -> bytes:
    message = attend_request([2])
    message.mask.kind, message.mask.bits = typed.AttentionMask.KIND_PAIRS, bytes(60 * MIB)
    return message.SerializeToString()


# By what it is: the method, what makes the message, and how it is answered. The first is refused by its size
# alone, and shows what receiving takes: grpcio copies a message twice before it hands it over, on the thread
# that takes calls and with the interpreter's lock held: 90 ms for 64 MiB of new memory, or 30 ms.
HOSTILE: dict[str, tuple[str, Callable[[], bytes], str]] = {
    "60 MB to a method of names": (READY, lambda: packed((15,), bytes(60 * MIB)), REFUSED),
    "60 MB of known words": (ATTEND, lambda: texts(*["Life is " * (MIB // 8 - 8)] * 60), REFUSED),
    "one word of 1 MB": (ATTEND, lambda: texts("x" * (MIB - 8)), INVALID),
    "BYTES of 15 M empty elements": (
        INFER,
        lambda: infer(TEXT, "text", "BYTES", [15_000_000]) + packed((RAW,), bytes(60_000_000)),
        REFUSED,
    ),
    "64 M ones as INT64": (INFER, ones_as_int64, REFUSED),
    "20 M unknown fields": (INFER, lambda: b"\xf8\x7f\x01" * 20_000_000, REFUSED),
    "a shape of 60 M axes": (INFER, lambda: packed((INPUTS, 3), b"\1" * (60 * MIB)), REFUSED),
    "60 M ids": (ATTEND, lambda: texts() + packed((4, 2), b"\1" * (60 * MIB)), INVALID),
    "503 M flags of a mask": (ATTEND, flags, REFUSED),
}


def attacked(server: ServerProcess, name: str) -> tuple[str, int, float, int]:
    """Sends a message once, beside a small request every 10 ms on another connection.

    Returns its status and reason, its bytes, the delay of others in seconds, and the server's growth.
    """
    method, build, _ = HOSTILE[name]
    message, seconds = build(), list[float]()
    with (
        grpc.insecure_channel(server.target, OWN_CONNECTION) as channel,
        grpc.insecure_channel(server.target, OWN_CONNECTION) as other,
    ):
        small: Any = AttentionServiceStub(other).Attend
        small(attend_request([4]), timeout=PATIENCE_SECONDS)
        grpc.channel_ready_future(channel).result(PATIENCE_SECONDS)
        before = reset_peak(server.process.pid)
        send: Any = channel.unary_unary(method)
        call = send.future(message, timeout=PATIENCE_SECONDS)
        while not (seconds and call.done()):
            started = time.perf_counter()
            small(attend_request([4]), timeout=PATIENCE_SECONDS)
            seconds.append(time.perf_counter() - started)
            time.sleep(max(0.0, 0.01 - seconds[-1]))
        status, info = rpc_status.from_call(call), error_details_pb2.ErrorInfo()
        is_explained = status is not None and status.details and status.details[0].Unpack(info)
        outcome = f"{call.code().name} {info.reason if is_explained else call.details()}"
    delay = max(seconds) - statistics.median(seconds)
    return outcome, len(message), delay, readings(server.process.pid).peak - before


def test_hostile_messages_are_answered_without_delay_or_memory(artifacts: Path, tmp_path: Path) -> None:
    floor = 0.0
    with Figures("hostile messages") as figures, server_of(artifacts, tmp_path) as server:
        for name, (_, _, answer) in HOSTILE.items():
            attacked(server, name)  # the first message of a size makes the allocator grow
            found = [attacked(server, name) for _ in range(REPEATS)]
            outcomes, sizes, delays, growths = zip(*found, strict=True)
            delay = statistics.median(delays)
            floor = floor or delay
            figures.equal(f"{name}: outcomes", set(outcomes), {answer})
            figures.at_most(f"{name}: delay of others, s", delay, MAX_DELAY_SECONDS + floor)
            bound = max(MIN_MEMORY_BYTES, MAX_MEMORY_RATIO * sizes[0])
            figures.at_most(f"{name}: growth, MiB", max(growths) / MIB, bound / MIB)

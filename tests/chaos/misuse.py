"""Bad callers of a soak: hostile messages, calls that are left, slow readers, connections without a call."""

import os
import random
import socket
import threading
from collections.abc import Callable
from contextlib import suppress

import grpc

from attention_serving.protos.attention.v1 import attention_pb2 as pb
from attention_serving.protos.inference import open_inference_pb2 as inference_pb
from tests.chaos.callers import OWN_CONNECTION, Tally
from tests.chaos.http2 import RawConnection
from tests.chaos.process import is_serving
from tests.chaos.requests import attend_message, attend_request, random_rows
from tests.server.samples import SELF, TEXT

Step = Callable[[], None]
ATTEND = "/attention.v1.AttentionService/Attend"
INFER = "/inference.GRPCInferenceService/ModelInfer"
MODEL, WIDTH = "multi-head-768x12", 768
CALL_SECONDS = 30.0
REPEATED = 160


def hostile(target: str, tally: Tally, rng: random.Random) -> Step:
    """Messages that no good client sends. Each must be refused, or answered if it can be."""
    channel = grpc.insecure_channel(target, OWN_CONNECTION)
    methods = {name: _bytes_method(channel, name) for name in (ATTEND, INFER)}
    messages = [(ATTEND, message) for message in _attend_messages()]
    messages += [(INFER, message) for message in _infer_messages()]

    def step() -> None:
        method, message = rng.choice(messages)
        if message and rng.random() < 0.3:
            message = _mutated(message, rng)
        try:
            methods[method](message, timeout=CALL_SECONDS)
        except grpc.RpcError as error:
            tally.failed(error)
        else:
            tally.answered(right=True)

    return step


def _bytes_method(channel: grpc.Channel, name: str) -> "grpc.UnaryUnaryMultiCallable[bytes, bytes]":
    """A method whose messages are bytes."""
    return channel.unary_unary(name, request_serializer=bytes, response_deserializer=bytes)


def _mutated(message: bytes, rng: random.Random) -> bytes:
    """A message with some bytes replaced, or cut short."""
    changed = bytearray(message[: rng.randrange(1, len(message) + 1)])
    for _ in range(rng.randrange(4)):
        changed[rng.randrange(len(changed))] = rng.randrange(256)
    return bytes(changed)


def _attend_messages() -> list[bytes]:
    """Wrong widths, lengths, types, names, masks; garbage; texts of unknown words."""
    good = attend_message(SELF, random_rows(8, 4))
    messages = []
    for change in (
        lambda m: setattr(m.query, "width", 5),
        lambda m: setattr(m.query, "width", 0),
        lambda m: m.query.lengths.append(2**31),
        lambda m: m.query.lengths.extend([0] * 5000),
        lambda m: m.query.ClearField("lengths"),
        lambda m: m.query.ClearField("data"),
        lambda m: setattr(m.query, "data_type", 99),
        lambda m: setattr(m, "model_name", "absent"),
        lambda m: setattr(m, "model_version", "9" * 5000),
        lambda m: setattr(m.mask, "kind", pb.AttentionMask.KIND_HEADS),
        lambda m: m.positions.extend(range(20000)),
        lambda m: m.text.texts.append("unknown words " * 5000),
    ):
        message = pb.AttendRequest.FromString(good.SerializeToString())
        change(message)
        messages.append(message.SerializeToString())
    texts = pb.TextSequences(texts=["", "Life " * 3000])
    messages.append(pb.AttendRequest(model_name=TEXT, text=texts).SerializeToString())
    return [*messages, os.urandom(200), b"", good.SerializeToString()]


def _infer_messages() -> list[bytes]:
    """Wrong shapes and types, contents that do not fit, names that repeat."""
    tensor = inference_pb.ModelInferRequest.InferInputTensor
    output = inference_pb.ModelInferRequest.InferRequestedOutputTensor
    data = random_rows(8, 4).tobytes()

    def request(raw: list[bytes], *inputs: tensor, outputs: int = 0) -> bytes:  # type: ignore[valid-type]
        wanted = [output(name="attention_weights") for _ in range(outputs)]
        return inference_pb.ModelInferRequest(
            model_name=SELF, inputs=inputs, outputs=wanted, raw_input_contents=raw
        ).SerializeToString()

    query = tensor(name="query", datatype="FP32", shape=[1, 8, 4])
    return [
        request([data], query),
        request([data], query, outputs=REPEATED),
        request([data] * 100, *[query] * 100),
        request([], query),
        request([data], tensor(name="query", datatype="FP32", shape=[1, -8, 4])),
        request([data], tensor(name="query", datatype="FP32", shape=[2**40, 2**40])),
        request([data], tensor(name="query", datatype="BYTES", shape=[1, 8, 4])),
        request([data], tensor(name="other", datatype="FP32", shape=[1, 8, 4])),
    ]


def cancelled(target: str, tally: Tally, rng: random.Random) -> Step:
    """Calls that their caller cancels after a while, before, during or after their run."""
    channel = grpc.insecure_channel(target, OWN_CONNECTION)
    attend = _bytes_method(channel, ATTEND)
    messages = [attend_request(MODEL, random_rows(rows, WIDTH)) for rows in (6, 128, 1000)]

    def step() -> None:
        call = attend.future(rng.choice(messages), timeout=CALL_SECONDS)
        threading.Event().wait(rng.random() * 0.05)
        call.cancel()
        try:
            call.result()
        except grpc.FutureCancelledError:
            tally.answered(right=True, status="CANCELLED")
        except grpc.RpcError as error:
            tally.failed(error)
        else:
            tally.answered(right=True)

    return step


def short_deadlines(target: str, tally: Tally, rng: random.Random) -> Step:
    """Calls with deadlines of 1 to 20 ms."""
    channel = grpc.insecure_channel(target, OWN_CONNECTION)
    attend, message = _bytes_method(channel, ATTEND), attend_request(MODEL, random_rows(64, WIDTH))

    def step() -> None:
        try:
            attend(message, timeout=rng.uniform(0.001, 0.02))
        except grpc.RpcError as error:
            tally.failed(error)
        else:
            tally.answered(right=True)
        threading.Event().wait(0.02)

    return step


def slow_readers(port: int, rng: random.Random) -> Step:
    """Callers who do not read answers of 512 KiB for some seconds, and then leave."""
    message = attend_request(SELF, random_rows(256, 4), return_weights=True)

    def step() -> None:
        with RawConnection(port, window=0) as reader:
            for _ in range(4):
                reader.call(ATTEND, message)
            reader.receive_for(rng.uniform(0.5, 8))

    return step


def half_senders(port: int, rng: random.Random) -> Step:
    """Callers who send headers, or half a message, and then leave after some seconds."""
    message = attend_request(SELF, random_rows(256, 4))

    def step() -> None:
        with RawConnection(port) as sender:
            for _ in range(4):
                sender.open(ATTEND)
                sender.send_part(sender.open(ATTEND), message, rng.randrange(len(message)))
            sender.receive_for(rng.uniform(0.5, 8))

    return step


def visitors(port: int, target: str, rng: random.Random) -> Step:
    """Connections that are opened and closed: without a byte, with garbage, and with a health check."""

    def step() -> None:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5) as visitor:
            if rng.random() < 0.5:
                visitor.sendall(os.urandom(rng.randrange(1, 400)))
                visitor.recv(64)
        is_serving(target)
        threading.Event().wait(0.05)

    return step

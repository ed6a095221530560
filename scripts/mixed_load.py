"""A mixed load on loopback: good requests of every kind, refused ones, bursts, and changes of models."""

import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import grpc
import numpy as np
from attention_client import AttendInputs, AttentionClient, AttentionClientError, ModelInfo

from attention_serving.protos.attention.v1 import attention_pb2 as pb
from attention_serving.protos.attention.v1.attention_pb2_grpc import AttentionServiceStub
from attention_serving.protos.inference import open_inference_pb2 as inference_pb
from attention_serving.protos.inference.open_inference_pb2_grpc import GRPCInferenceServiceStub

CALLERS = 6
# Calls that are sent at once, which is more than the server of the check takes.
BURST, BURST_SECONDS, SWAP_SECONDS = 64, 3.0, 6.0
TIMEOUT_SECONDS = 20.0
LONGEST = 96
INPUTS = ("query", "key", "value")
TEXT = "Life is short, eat dessert first"
# How often each kind of request is sent, beside the others.
WEIGHTS = (40, 10, 5, 5, 5, 1, 1, 1)


@contextmanager
def mixed_load(targets: list[str], swapped: tuple[str, str]) -> Iterator[None]:
    """Sends requests of every kind until the block ends.

    Args:
        targets: HOST:PORT of the servers.
        swapped: HOST:PORT of a server with `--model-control explicit`, and the name of a model that is
            unloaded and loaded again and again.
    """
    ended = threading.Event()
    works = [partial(_call, target, seed, ended) for seed in range(CALLERS) for target in targets]
    works += [partial(_burst, target, ended) for target in targets]
    works.append(partial(_swap, *swapped, ended))
    with ThreadPoolExecutor(len(works)) as threads:
        running = [threads.submit(work) for work in works]
        try:
            yield
        finally:
            ended.set()
    for work in running:
        work.result()


def _call(target: str, seed: int, ended: threading.Event) -> None:
    """Sends one request after the other, and ignores that some are refused."""
    choices, rng = random.Random(seed), np.random.default_rng(seed)  # noqa: S311 - not for secrets
    with AttentionClient(target, timeout=TIMEOUT_SECONDS) as client:
        ready = [model for model in client.models() if model.state == "ready"]
        models = [model for model in ready if _takes_vectors(model)]
        texts = [model.name for model in ready if model.accepts_text]
        kinds: list[Callable[[ModelInfo], object]] = [
            lambda model: client.attend(model.name, **_inputs(model, rng)),
            lambda model: client.attend(model.name, **_lists(model, rng)),
            lambda model: client.attend(model.name, **_inputs(model, rng), return_weights=True),
            lambda model: list(client.attend_stream(model.name, _streamed(model, rng))),
            lambda _: client.attend_text(choices.choice(texts), TEXT) if texts else None,
            lambda model: client.attend(model.name, np.ones((2, 3), np.float32)),  # of a wrong width
            lambda model: client.attend(f"unknown-{model.name}", np.ones((2, 4), np.float32)),
            lambda model: client.attend(model.name, **_lists(model, rng), timeout=0.002),
        ]
        while not ended.is_set():
            (kind,) = choices.choices(kinds, WEIGHTS)
            with suppress(AttentionClientError):
                kind(choices.choice(models))


def _takes_vectors(model: ModelInfo) -> bool:
    return all(spec.name in INPUTS for spec in model.inputs if not spec.optional)


def _inputs(model: ModelInfo, rng: np.random.Generator) -> dict[str, Any]:
    """One sequence for each input of a model, as long as its axis."""
    lengths: dict[str | int, int] = {}
    found: dict[str, Any] = {}
    for spec in model.inputs:
        if not spec.optional:
            length = lengths.setdefault(spec.axes[1], int(rng.integers(1, LONGEST)))
            found[spec.name] = rng.standard_normal((length, int(spec.axes[2])), dtype=np.float32)
    return found


def _lists(model: ModelInfo, rng: np.random.Generator) -> dict[str, Any]:
    """Four sequences of different lengths."""
    sequences = [_inputs(model, rng) for _ in range(4)]
    return {name: [each[name] for each in sequences] for name in sequences[0]}


def _streamed(model: ModelInfo, rng: np.random.Generator) -> Iterator[AttendInputs]:
    for _ in range(8):
        yield AttendInputs(**_inputs(model, rng))


def _burst(target: str, ended: threading.Event) -> None:
    """Sends more calls at once than the server takes, every few seconds."""
    with AttentionClient(target) as client:
        (model, *_) = [model for model in client.models() if model.state == "ready" and _takes_vectors(model)]
    rows = _inputs(model, np.random.default_rng(0))
    vectors: dict[str, Any] = {
        name: pb.VectorSequences(
            data_type=pb.DATA_TYPE_FP32, width=array.shape[1], lengths=[len(array)], data=array.tobytes()
        )
        for name, array in rows.items()
    }
    request = pb.AttendRequest(model_name=model.name, **vectors)
    with grpc.insecure_channel(target) as channel:
        stub = AttentionServiceStub(channel)
        while not ended.wait(BURST_SECONDS):
            calls = [stub.Attend.future(request, timeout=TIMEOUT_SECONDS) for _ in range(BURST)]
            for call in calls:
                call.exception()  # waits; that some are refused is intended


def _swap(target: str, name: str, ended: threading.Event) -> None:
    """Unloads and loads a model, again and again."""
    with grpc.insecure_channel(target) as channel:
        stub = GRPCInferenceServiceStub(channel)
        while not ended.wait(SWAP_SECONDS):
            with suppress(grpc.RpcError):
                stub.RepositoryModelUnload(inference_pb.RepositoryModelUnloadRequest(model_name=name))
                stub.RepositoryModelLoad(inference_pb.RepositoryModelLoadRequest(model_name=name))

"""Bad input over attention.v1: a clear refusal that names the field, and no neighbour disturbed."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np
import pytest
from attention_client import AttentionClient
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from attention_serving.model.presets import build_preset
from attention_serving.protos.attention.v1 import attention_pb2 as pb
from attention_serving.protos.attention.v1 import attention_pb2_grpc
from scripts.local_server import ServerProcess
from tests.support.eager import assert_parity, attend

MODEL = "self-attention"
CROSS = "cross-768x12"
INVALID = grpc.StatusCode.INVALID_ARGUMENT


def vectors(width: int = 16, lengths: tuple[int, ...] = (3,), **fields: Any) -> pb.VectorSequences:
    """Returns sequences of ones, well formed unless a field overrides that."""
    data = np.ones((sum(lengths), width), np.float32).tobytes()
    given: dict[str, Any] = {
        "data_type": pb.DATA_TYPE_FP32,
        "width": width,
        "lengths": lengths,
        "data": data,
    } | fields
    return pb.VectorSequences(**given)


def ask(model: str = MODEL, **fields: Any) -> Callable[[], pb.AttendRequest]:
    """Returns a function that makes a request, so that it is made when its test runs."""
    return lambda: pb.AttendRequest(model_name=model, **fields)


def cross(query: pb.VectorSequences | None, key: Any, value: Any) -> Callable[[], pb.AttendRequest]:
    """Returns a function that makes a request to the model with three inputs."""
    return ask(CROSS, query=query, key=key, value=value)


WIDE: dict[str, Any] = {"width": 768}
REFUSALS = {
    "wrong width": (ask(query=vectors(17)), "query", "rows are 17 wide; the model takes 16"),
    "no input": (ask(), "query", "is missing"),
    "no sequences": (ask(query=vectors(lengths=())), "query", "does not contain any sequence"),
    "zero tokens": (ask(query=vectors(lengths=(3, 0))), "query", "sequence 1 is empty"),
    "unknown data type": (ask(query=vectors(data_type=77)), "query.data_type", "is 77; must be one of"),
    "no data type": (ask(query=vectors(data_type=0)), "query.data_type", "is 0; must be one of"),
    "another data type": (
        ask(query=vectors(data_type=pb.DATA_TYPE_INT64, data=b"\0" * 384)),
        "query",
        "is int64; the model takes float32",
    ),
    "zero width": (ask(query=vectors(0)), "query.width", "must be at least 1"),
    "too few bytes": (ask(query=vectors(data=b"\0" * 8)), "query.data", "8 bytes; 3 x 16 elements"),
    "too many bytes": (ask(query=vectors(data=b"\0" * 196)), "query.data", "need 192 bytes"),
    "text to a vector model": (ask(text=pb.TextSequences(texts=["eat"])), "text", "takes query, not text"),
    "token ids to a vector model": (
        ask(token_ids=pb.TokenSequences(lengths=[1], ids=[0])),
        "token_ids",
        "takes query",
    ),
    "a key for self-attention": (ask(query=vectors(), key=vectors()), "key", "takes query"),
    "key missing": (cross(vectors(**WIDE), None, vectors(**WIDE)), "key", "is missing"),
    "value missing": (cross(vectors(**WIDE), vectors(**WIDE), None), "value", "is missing"),
    "key and value differ": (
        cross(vectors(**WIDE), vectors(**WIDE), vectors(768, (4,))),
        "value",
        "sequence 0 has 4 rows; key has 3",
    ),
    "fewer keys than queries": (
        cross(vectors(768, (3, 3)), vectors(**WIDE), vectors(**WIDE)),
        "key",
        "contains 1 sequences; query contains 2",
    ),
    "mask of another size": (
        ask(query=vectors(), mask=pb.AttentionMask(kind=pb.AttentionMask.KIND_PAIRS, bits=b"\1")),
        "mask",
        "need 9",
    ),
    "mask of no kind": (
        ask(query=vectors(), mask=pb.AttentionMask(bits=b"\1")),
        "mask.kind",
        "must be one of",
    ),
    "too long": (ask(query=vectors(lengths=(9000,))), "query", "9000 rows; the limit is 8192"),
    "too many sequences": (ask(query=vectors(lengths=(1,) * 5000)), "query", "5000 sequences"),
    "weights too large": (
        ask("multi-head-768x12", query=vectors(768, (2000,)), return_weights=True),
        "return_weights",
        "the limit is 67043328",
    ),
    "unknown words": (
        ask("sentence-self-attention", text=pb.TextSequences(texts=["Life is cheese, eat bread"])),
        "text",
        "'cheese', 'bread'",
    ),
    "empty text": (
        ask("sentence-self-attention", text=pb.TextSequences(texts=[" "])),
        "text",
        "does not contain any words",
    ),
    "no texts": (ask("sentence-self-attention", text=pb.TextSequences()), "text", "has no sequences"),
    "token id too large": (
        ask("sentence-self-attention", token_ids=pb.TokenSequences(lengths=[2], ids=[0, 6])),
        "token_ids",
        "between 0 and 5",
    ),
    "negative token id": (
        ask("sentence-self-attention", token_ids=pb.TokenSequences(lengths=[2], ids=[0, -1])),
        "token_ids",
        "between 0 and 5",
    ),
    "token counts differ": (
        ask("sentence-self-attention", token_ids=pb.TokenSequences(lengths=[3], ids=[0, 1])),
        "token_ids.ids",
        "has 2 ids",
    ),
}


@dataclass(frozen=True)
class Refusal:
    """The status of a refused call, with its details."""

    code: grpc.StatusCode
    message: str
    field: str = ""
    reason: str = ""


def refusal(target: str, request: pb.AttendRequest) -> Refusal:
    """Sends a request that must be refused, and returns the refusal."""
    options = [("grpc.max_send_message_length", -1)]
    with grpc.insecure_channel(target, options) as channel:
        call = attention_pb2_grpc.AttentionServiceStub(channel).Attend.future(request, timeout=30)
        assert isinstance(call.exception(), grpc.RpcError)
        status = rpc_status.from_call(call)
        if status is None:
            return Refusal(call.code(), call.details() or "")
        info, bad = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
        for detail in status.details:
            _ = detail.Unpack(info) or detail.Unpack(bad)
        field = bad.field_violations[0].field if bad.field_violations else ""
        return Refusal(call.code(), status.message, field, info.reason)


@pytest.mark.parametrize(("request_", "field", "text"), REFUSALS.values(), ids=REFUSALS.keys())
def test_refused_by_field(
    server: ServerProcess, request_: Callable[[], pb.AttendRequest], field: str, text: str
) -> None:
    found = refusal(server.target, request_())
    assert (found.code, found.field) == (INVALID, field)
    assert text in found.message
    assert found.reason in ("INVALID_FIELD", "LIMIT_EXCEEDED")


def test_unknown_model_and_version_are_not_found(server: ServerProcess) -> None:
    found = refusal(server.target, ask("nonesuch", query=vectors())())
    assert (found.code, found.field) == (grpc.StatusCode.NOT_FOUND, "model_name")
    assert found.reason == "MODEL_NOT_FOUND"
    assert "'nonesuch'" in found.message
    found = refusal(server.target, ask(query=vectors(), model_version="9")())
    assert (found.code, found.field) == (grpc.StatusCode.NOT_FOUND, "model_version")
    assert "it has: 1" in found.message


def test_a_message_beyond_the_limit_is_refused_with_the_limit(server: ServerProcess) -> None:
    found = refusal(server.target, ask(query=vectors(16, (1 << 20, 1)))())
    assert found.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert str(64 << 20) in found.message


def test_bad_requests_do_not_affect_good_ones(server: ServerProcess, client: AttentionClient) -> None:
    query = np.random.default_rng(0).standard_normal((5, 16), dtype=np.float32)
    eager, _ = attend(build_preset(MODEL), query)
    bad = [make() for make, *_ in REFUSALS.values()]
    with ThreadPoolExecutor(8) as pool:
        refused = [pool.submit(refusal, server.target, request) for request in bad * 2]
        served = [pool.submit(client.attend, MODEL, query) for _ in range(60)]
        for answer in served:
            assert_parity(answer.result().context_vectors, eager)
        assert {answer.result().code for answer in refused} == {INVALID}

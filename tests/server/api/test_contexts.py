"""The methods of stored contexts, and requests of both protocols that name one."""

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import grpc
import numpy as np
import pytest
from attention_client.errors import from_rpc_error

from attention_serving.protos.attention.v1 import attention_pb2 as pb
from attention_serving.protos.attention.v1.attention_pb2_grpc import AttentionServiceStub
from attention_serving.protos.inference import open_inference_pb2 as oip
from attention_serving.protos.inference.open_inference_pb2_grpc import GRPCInferenceServiceStub
from attention_serving.server.api.attention import handlers
from attention_serving.server.engine.contexts import ContextStore
from attention_serving.server.engine.limits import Limits
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.types import CONTEXT_BYTES, Array
from tests.server.api.messages import raw_request, vectors
from tests.server.api.served import Secured, bearer
from tests.server.samples import CROSS, SELF, TEXT, eager_module
from tests.server.seams import SAME_FOR_ALL, Gate, Served, costing, tapped, wait_until
from tests.support.eager import assert_parity, attend

RNG = np.random.default_rng(7)
KEY, VALUE = RNG.standard_normal((9, 6), np.float32), RNG.standard_normal((9, 5), np.float32)
QUERIES = [RNG.standard_normal((rows, 4), np.float32) for rows in (2, 3, 1, 4)]
KEYS, PAIRS, FLOATS = pb.AttentionMask.KIND_KEYS, pb.AttentionMask.KIND_PAIRS, pb.DATA_TYPE_FP32
Change = dict[str, Any]


def put(stub: AttentionServiceStub, *, caller: str | None = None, **changes: Any) -> pb.Context:
    message = {"model_name": CROSS, "key": vectors(KEY), "value": vectors(VALUE), **changes}
    return stub.PutContext(pb.PutContextRequest(**message), metadata=bearer(caller)).context


def refusal(call: Callable[[], object]) -> tuple[str, str, str]:
    """Code, reason and field of a call that fails."""
    with pytest.raises(grpc.RpcError) as error:
        call()
    found = from_rpc_error(error.value)
    return error.value.code().name, found.reason, found.field


EMPTY = pb.VectorSequences(data_type=FLOATS, width=6)
LONG = {"key": vectors(np.tile(KEY, (30, 1))), "value": vectors(np.tile(VALUE, (30, 1)))}
# Changes of a context, and the field at fault.
WRONG: list[tuple[Change, str]] = [
    ({"key": None}, "key"),
    ({"key": vectors(KEY, KEY)}, "key"),
    ({"key": EMPTY}, "key"),
    ({"key": vectors(VALUE)}, "key"),
    ({"value": None}, "value"),
    ({"value": vectors(VALUE[:3])}, "value"),
    ({"model_name": SELF}, "value"),
    ({"mask": pb.AttentionMask(kind=PAIRS, bits=b"\xff")}, "mask"),
    ({"mask": pb.AttentionMask(kind=KEYS, bits=b"\xff")}, "mask"),
    ({"mask": pb.AttentionMask(kind=KEYS, bits=b"\0\0")}, "mask"),
]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"model_name": "unknown"}, ("NOT_FOUND", "MODEL_NOT_FOUND", "model_name")),
        ({"model_name": TEXT}, ("UNIMPLEMENTED", "UNSUPPORTED", "")),
        (LONG, ("INVALID_ARGUMENT", "LIMIT_EXCEEDED", "key")),
        *((changes, ("INVALID_ARGUMENT", "INVALID_FIELD", field)) for changes, field in WRONG),
    ],
)
def test_what_is_no_context_is_refused(
    models: dict[str, LoadedModel], changes: Change, expected: tuple[str, str, str]
) -> None:
    limits = Limits(max_context_bytes=CONTEXT_BYTES + 10_000)
    with Served(*models.values(), limits=limits) as served:
        stub = AttentionServiceStub(served.channel)
        assert refusal(lambda: put(stub, **changes)) == expected
        wait_until(lambda: served.engine.budget.held_bytes == served.engine.contexts.held_bytes == 0)


def test_putting_twice_is_free_and_a_name_that_is_unknown_is_refused(cross_model: LoadedModel) -> None:
    runs = list[str]()
    with Served(tapped(cross_model, lambda inputs: runs.append(*inputs.keys() & {"key"}))) as served:
        stub, append = AttentionServiceStub(served.channel), pb.AppendContextRequest(
            model_name=CROSS, id="none", key=vectors(KEY), value=vectors(VALUE)
        )  # fmt: skip
        first = put(stub, ttl_seconds=60)
        again = put(stub, ttl_seconds=600)
        assert (first.id, first.rows, first.bytes) == (again.id, again.rows, again.bytes)
        assert again.expires_at == pytest.approx(first.expires_at + 540, abs=5)
        assert runs == ["key"]
        assert put(stub, value=vectors(VALUE + 1)).id != first.id
        unknown = ("NOT_FOUND", "CONTEXT_NOT_FOUND")
        drop = pb.DropContextRequest(model_name=CROSS, id="none")
        query = pb.AttendRequest(model_name=CROSS, query=vectors(QUERIES[0]), context_id="none")
        for call in (lambda: stub.AppendContext(append), lambda: stub.DropContext(drop)):
            assert refusal(call) == (*unknown, "id")
        assert refusal(lambda: stub.Attend(query)) == (*unknown, "context_id")
        listed = stub.ListContexts(pb.ListContextsRequest(model_name=CROSS)).contexts
        assert len(listed) == 2
        query.context_id = first.id
        query.key.CopyFrom(vectors(KEY))
        assert refusal(lambda: stub.Attend(query)) == ("INVALID_ARGUMENT", "INVALID_FIELD", "key")


def test_contexts_are_listed_in_pages_on_the_codec_threads(
    cross_model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last used first. What asks for no pages gets the first one."""
    threads, page = set[str](), ContextStore.page

    def recorded(*arguments: Any) -> Any:
        threads.add(threading.current_thread().name)
        return page(*arguments)

    monkeypatch.setattr(ContextStore, "page", recorded)
    monkeypatch.setattr(handlers, "MAX_PAGE", 3)
    with Served(cross_model) as served:
        stub = AttentionServiceStub(served.channel)
        stored = [put(stub, value=vectors(VALUE + index)).id for index in range(5)]

        def listed(**fields: Any) -> tuple[list[str], str]:
            response = stub.ListContexts(pb.ListContextsRequest(model_name=CROSS, **fields))
            return [context.id for context in response.contexts], response.next_page_token

        pages, token = list[list[str]](), ""
        while not pages or token:
            names, token = listed(page_size=2, page_token=token)
            pages.append(names)
        assert pages == [stored[:2:-1], stored[2:0:-1], stored[:1]]
        first, token = listed()
        assert (first, listed(page_size=99)) == (stored[:1:-1], (first, token))
        assert listed(page_token=token) == (stored[1::-1], "")
        for field, value in (("page_size", -1), ("page_token", "none"), ("page_token", "9" * 99)):
            call = partial(listed, **{field: value})
            assert refusal(call) == ("INVALID_ARGUMENT", "INVALID_FIELD", field)
    assert {name.partition("_")[0] for name in threads} == {"codec"}


def test_queries_to_one_context_run_together_in_both_protocols(cross_model: LoadedModel) -> None:
    """Of different lengths, with and without masks: without padding."""
    gate, seen = Gate(), list[tuple[int, ...]]()

    def tap(inputs: dict[str, Array]) -> None:
        if "projected_keys" in inputs:
            seen.append(inputs["query"].shape)
            gate(inputs)

    expected = [attend(eager_module(CROSS), own, KEY, VALUE)[0] for own in QUERIES]
    with Served(tapped(costing(cross_model, SAME_FOR_ALL), tap)) as served:
        stub = AttentionServiceStub(served.channel)
        context = put(stub)
        served.engine.has_queued(1)
        asked = pb.AttendRequest(model_name=CROSS, context_id=context.id)
        calls = []
        for own in QUERIES:
            asked.query.CopyFrom(vectors(own))
            calls.append(stub.Attend.future(asked))
            served.engine.has_queued(1)
            if len(calls) == 1:
                gate.entered.wait()
        gate.open()
        for call, own in zip(calls, expected, strict=True):
            assert_parity(np.frombuffer(call.result().context_vectors.data, np.float32).reshape(-1, 4), own)
        assert seen == [(1, 2, 4), (1, 8, 4)]
        batch = raw_request(cross_model, {"query": np.stack([QUERIES[1]] * 2)})
        batch.parameters["context_id"].string_param = context.id
        infer = GRPCInferenceServiceStub(served.channel)
        reply = infer.ModelInfer(batch)
        for own in np.frombuffer(reply.raw_output_contents[0], np.float32).reshape(2, 3, 4):
            assert_parity(own, expected[1])
        batch.parameters["context_id"].int64_param = 1
        assert refusal(lambda: infer.ModelInfer(batch)) == ("INVALID_ARGUMENT", "INVALID_FIELD", "context_id")


def test_a_context_that_is_gone_is_not_found_even_if_the_request_is_cached(secured: Secured) -> None:
    """Nor is another caller's; a context that is shared is everybody's."""
    stub = AttentionServiceStub(secured.served.channel)
    own, shared = put(stub, caller="all-token"), put(stub, caller="all-token", shared=True, ttl_seconds=5)
    gone = ("NOT_FOUND", "CONTEXT_NOT_FOUND", "context_id")

    def listed(caller: str) -> list[str]:
        request = pb.ListContextsRequest(model_name=CROSS)
        return [context.id for context in stub.ListContexts(request, metadata=bearer(caller)).contexts]

    def ask(context: pb.Context, caller: str) -> pb.AttendResponse:
        request = pb.AttendRequest(model_name=CROSS, context_id=context.id, query=vectors(QUERIES[0]))
        return stub.Attend(request, metadata=bearer(caller))

    assert own.id == shared.id
    drop = pb.DropContextRequest(model_name=CROSS, id=own.id)
    for _ in range(2):  # the second is a cache hit
        assert ask(own, "all-token") == ask(shared, "caller-token")
    assert listed("caller-token") == [shared.id]
    assert refusal(lambda: stub.DropContext(drop, metadata=bearer("caller-token")))[1] == "CONTEXT_NOT_FOUND"
    stub.DropContext(drop, metadata=bearer("all-token"))
    assert ask(own, "all-token")
    stub.DropContext(drop, metadata=bearer("all-token"))
    assert refusal(lambda: ask(own, "all-token")) == refusal(lambda: ask(own, "caller-token")) == gone
    again = put(stub, caller="all-token")
    for _ in range(2):
        assert ask(again, "all-token")
        assert refusal(lambda: ask(again, "caller-token")) == gone
    assert (listed("all-token"), listed("caller-token")) == ([again.id], [])
    assert refusal(lambda: put(stub, caller="reader-token"))[0] == "PERMISSION_DENIED"


def test_metadata_of_a_model_is_that_without_a_context(cross_model: LoadedModel) -> None:
    with Served(cross_model) as served:
        put(AttentionServiceStub(served.channel))
        stub = GRPCInferenceServiceStub(served.channel)
        described = stub.ModelMetadata(oip.ModelMetadataRequest(name=CROSS))
    assert [tensor.name for tensor in described.inputs][:3] == ["query", "key", "value"]

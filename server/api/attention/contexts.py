"""The methods of attention.v1 for stored contexts: put, append, drop and list."""

import math
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeAlias

import numpy as np
from google.protobuf.descriptor import ServiceDescriptor

from attention_serving.artifact.manifest import KEY_POSITIONS
from attention_serving.protos.attention.v1 import attention_pb2 as pb
from attention_serving.server.api.attention.codec import Decoder
from attention_serving.server.api.codec_threads import CodecThreads
from attention_serving.server.api.method import Method, caller_of, find_model, of_names, parse
from attention_serving.server.api.protobuf_bytes import Parsed, reader
from attention_serving.server.api.tensors import Allowance
from attention_serving.server.engine.budget import Reservation
from attention_serving.server.engine.contexts import DEFAULT_TTL_SECONDS, context_id, joined, projected_inputs
from attention_serving.server.engine.engine import Engine
from attention_serving.server.engine.errors import EngineError, InvalidRequestError, quoted
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.requests.request import Request
from attention_serving.server.engine.types import (
    CONTEXT_BYTES,
    Array,
    Context,
    DecodedRequest,
    MaskKind,
    Ragged,
)
from attention_serving.server.security.rights import Right
from attention_serving.server.transport.call import Call

# The fields that are cut out of requests.
PATHS = ("key.data", "value.data", "mask.bits", "key.lengths", "value.lengths")
# Contexts in a page at most, and digits of a token.
MAX_PAGE, MAX_TOKEN = 1000, 20


# What is to be stored: the model of the repository, the context without its tensors, what makes them of the
# outputs of a run, and the request that runs; None if the context is stored already.
Put: TypeAlias = "tuple[LoadedModel, Context, Callable[..., dict[str, Array]], Request | None]"


class PutContext:
    """Projects rows and stores them: as a context, or as the continuation of one."""

    def __init__(self, engine: Engine, threads: CodecThreads, kind: Any, reply: Any) -> None:
        """Creates the method, from the types of its requests and replies."""
        self._engine, self._threads, self._contexts = engine, threads, engine.contexts
        self._read = reader(kind, PATHS, 1)
        self._reply = reply

    def method(self) -> Method:
        """What the server knows of the method."""
        budget = self._engine.budget
        return Method(handle=self.handle, is_inference=True, right=Right.INFER, budget=budget)

    async def handle(self, message: bytes, call: Call, reservation: Reservation) -> bytes:
        """Answers one request."""
        reservation.add(len(message))
        work = partial(self._decode, message, call, reservation)
        model, context, tensors, request = await self._threads.run(work, call.deadline)
        if request is not None:
            result = await self._engine.run(request, reservation)
            store = partial(self._contexts.put, model, context, partial(tensors, result.outputs))
            await self._threads.run(store, call.deadline)
        reply: bytes = self._reply(context=describe(context, model)).SerializeToString()
        return reply

    def _decode(self, message: bytes, call: Call, reservation: Reservation) -> Put:
        parsed = parse(self._read, message)
        name, version = parsed.message.model_name, parsed.message.model_version
        model = find_model(self._engine.model, call, Right.INFER, name, version)
        try:
            return self._validate(parsed, model, call, reservation)
        except EngineError as error:
            self._engine.refused(model, error, reservation)
            raise

    def _validate(self, parsed: Parsed[Any], model: LoadedModel, call: Call, reservation: Reservation) -> Put:
        message, caller, parent = parsed.message, caller_of(call), None
        projector = model.projector
        if isinstance(message, pb.AppendContextRequest):
            parent = self._contexts.find(model, message.id, caller.name, "id").context
        rows, hidden = _decode_rows(parsed, Allowance(self._engine.limits, reservation))
        length = 0 if parent is None else parent.length
        positions = np.flatnonzero(~hidden) + length
        if not positions.size:
            raise InvalidRequestError("mask", "hides every row")
        inputs = projected_inputs(projector, rows, positions)
        ragged = {name: Ragged(array, (len(array),)) for name, array in inputs.items()}
        request = self._engine.validate(
            projector, DecodedRequest(inputs=ragged, deadline=call.deadline, caller=caller)
        )
        new = Context(
            id=context_id(model, "" if parent is None else parent.id, {**rows, KEY_POSITIONS: positions}),
            nbytes=(CONTEXT_BYTES if parent is None else parent.nbytes)
            + request.plan.sequences[0].result_bytes
            + positions.nbytes,
            length=length + len(hidden),
            owner=caller.name,
            shared=message.shared if parent is None else parent.shared and parent.owner == caller.name,
            expires_at=time.time() + (message.ttl_seconds or DEFAULT_TTL_SECONDS),
        )
        stored = self._contexts.existing(model, new.id, caller.name)
        if stored is not None and stored.context is not None and stored.context.shared >= new.shared:
            if stored.context.owner == caller.name:
                self._contexts.renew(model, stored.context, new.expires_at)
            return model, stored.context, dict, None
        self._contexts.check_size(new.nbytes)
        return model, new, partial(joined, parent, positions), request


def _decode_rows(parsed: Parsed[Any], allowance: Allowance) -> tuple[dict[str, Array], Array]:
    """The rows (T, d) of each input that no mask hides; and which of the rows that were sent one hides."""
    message, decoder = parsed.message, Decoder(parsed, allowance)
    names = filter(message.HasField, ("key", "value"))
    vectors = {name: decoder.vectors(name, getattr(message, name)) for name in names}
    if "key" not in vectors:
        raise InvalidRequestError("key", "is missing; a context consists of key rows")
    for name, ragged in vectors.items():
        if len(ragged.lengths) != 1 or ragged.lengths != vectors["key"].lengths:
            rule = "must be one sequence" if name == "key" else "must have as many rows as key"
            raise InvalidRequestError(name, f"has lengths {list(ragged.lengths[:9])}; {rule}")
    count = vectors["key"].lengths[0]
    hidden: Array = np.zeros(count, np.bool_)
    if message.HasField("mask"):
        mask = decoder.mask(message.mask.kind)
        if mask.kind is not MaskKind.KEYS or not mask.holds(count):
            raise InvalidRequestError("mask", f"must be of kind keys, with a bit for each of {count} rows")
        hidden = ~mask.flags(count)
    rows = {name: ragged.rows[~hidden] if hidden.any() else ragged.rows for name, ragged in vectors.items()}
    return rows, hidden


def methods(service: ServiceDescriptor, engine: Engine, threads: CodecThreads) -> Mapping[str, Method]:
    """Each method by its full name.

    Args:
        service: The service that they are part of.
        engine: Projects rows, and has the contexts.
        threads: Decode what is large, store it, list and drop.
    """

    async def drop(request: pb.DropContextRequest, call: Call) -> pb.DropContextResponse:
        model = find_model(engine.model, call, Right.INFER, request.model_name, request.model_version)
        work = partial(engine.contexts.drop, model, request.id, caller_of(call).name)
        await threads.run(work, call.deadline)
        return pb.DropContextResponse()

    async def list_page(request: pb.ListContextsRequest, call: Call) -> pb.ListContextsResponse:
        model = find_model(engine.model, call, Right.INFER, request.model_name, request.model_version)
        return await threads.run(partial(_page, engine, model, caller_of(call).name, request), call.deadline)

    # Of inference, so that an identity's limits hold for them: they take longer with each stored context.
    facts: dict[str, Any] = {"is_inference": True, "right": Right.INFER}
    put = PutContext(engine, threads, pb.PutContextRequest, pb.PutContextResponse)
    append = PutContext(engine, threads, pb.AppendContextRequest, pb.AppendContextResponse)
    return {
        f"/{service.full_name}/PutContext": put.method(),
        f"/{service.full_name}/AppendContext": append.method(),
        f"/{service.full_name}/DropContext": of_names(pb.DropContextRequest.FromString, drop, **facts),
        f"/{service.full_name}/ListContexts": of_names(pb.ListContextsRequest.FromString, list_page, **facts),
    }


def _page(
    engine: Engine, model: LoadedModel, caller: str, request: pb.ListContextsRequest
) -> pb.ListContextsResponse:
    """The contexts of a page, whose token is when the last one of the page before was used."""
    token, size = request.page_token, request.page_size
    if size < 0:
        raise InvalidRequestError("page_size", f"is {size}; must be at least 0, for up to {MAX_PAGE}")
    if token and not (token.isdecimal() and len(token) < MAX_TOKEN):
        message = f"is {quoted(token)}; must be empty, or the next_page_token of the page before"
        raise InvalidRequestError("page_token", message)
    before = int(token) if token else math.inf
    contexts, following = engine.contexts.page(model, caller, min(size or MAX_PAGE, MAX_PAGE), before)
    return pb.ListContextsResponse(
        contexts=[describe(context, model) for context in contexts],
        next_page_token=str(following) if following else "",
    )


def describe(context: Context, model: LoadedModel) -> pb.Context:
    """A context of a model, as callers see it."""
    return pb.Context(
        id=context.id,
        model_name=model.name,
        model_version=model.version,
        rows=context.rows,
        bytes=context.nbytes,
        expires_at=int(context.expires_at),
        shared=context.shared,
    )

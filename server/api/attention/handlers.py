"""The methods of attention.v1: inference, stored contexts (put, append, drop, list), tokens, and models."""

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, ClassVar, NamedTuple

import numpy as np

from attention_serving.artifact.encoder import CONTEXT_VECTORS, EMBEDDING, SCORES
from attention_serving.artifact.manifest import KEY_POSITIONS
from attention_serving.protos.attention.v1 import attention_pb2 as pb
from attention_serving.server.api.attention import requests, responses
from attention_serving.server.api.codec_threads import CodecThreads
from attention_serving.server.api.errors import code_of
from attention_serving.server.api.inference import InferenceMethod
from attention_serving.server.api.method import (
    Method,
    ModelKind,
    control_method,
    control_methods,
    default_model,
    filter_permitted,
    find_model,
    parse,
)
from attention_serving.server.api.tensors import Allowance, ReplyTemplate
from attention_serving.server.api.wire import Parsed, copy_fields, encode_field, leading_text, make_parser
from attention_serving.server.engine.budget import Reservation
from attention_serving.server.engine.contexts import (
    DEFAULT_TTL_SECONDS,
    context_id,
    join_documents,
    join_tensors,
    projected_inputs,
)
from attention_serving.server.engine.engine import Engine
from attention_serving.server.engine.errors import (
    EngineError,
    InvalidRequestError,
    LimitExceededError,
    ModelNotFoundError,
    quoted,
)
from attention_serving.server.engine.facts import EMBEDS, TOKEN_VECTORS
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.models.repository import Model
from attention_serving.server.engine.requests.late_interaction import tokenize_comparison, tokenize_documents
from attention_serving.server.engine.requests.outputs import FLOAT_BYTES
from attention_serving.server.engine.requests.request import Request
from attention_serving.server.engine.requests.tokenizer import TEXT, TOKEN_IDS, TextLimits
from attention_serving.server.engine.requests.validation import encode_texts, text_limits, tokenize_texts
from attention_serving.server.engine.types import (
    CONTEXT_BYTES,
    DOCUMENT_LENGTHS,
    Array,
    Context,
    DecodedRequest,
    Ragged,
    Result,
)
from attention_serving.server.security.rights import Right
from attention_serving.server.transport.call import Call

SERVICE = pb.DESCRIPTOR.services_by_name["AttentionService"]
# A response contains the id of its request.
MAX_ID_BYTES = 1024
RESPONSE = (pb.AttendStreamResponse.RESPONSE_FIELD_NUMBER,)
# Contexts in a page at most, and digits of a token.
MAX_PAGE, MAX_TOKEN = 1000, 20
# Memory of a token while texts are encoded, and with a reply and its Python objects; and its bytes in a reply
# at least.
ENCODED_BYTES, TOKEN_BYTES, LEAST_TOKEN_BYTES = 32, 192, 12


class DecodedContext(NamedTuple):
    """What a context is made of.

    Attributes:
        request: The request that runs.
        arrays: What the id is a hash of.
        length: Number of rows, hidden ones included.
        nbytes: Size of the tensors.
        make_tensors: Makes them of the context that is continued, if any, and of the outputs of the run.
    """

    request: Request
    arrays: Mapping[str, Array]
    length: int
    nbytes: int
    make_tensors: Callable[..., dict[str, Array]]


class PreparedContext(NamedTuple):
    """A context that is to be stored.

    Attributes:
        model: The model of the repository.
        context: The context, without its tensors.
        make_tensors: Makes them of the outputs of the run.
        request: The request that runs; None if the context is stored already.
    """

    model: LoadedModel
    context: Context
    make_tensors: Callable[..., dict[str, Array]]
    request: Request | None


class Attend(InferenceMethod):
    """Computes the context vectors of one request."""

    message_type: ClassVar[Any] = pb.AttendRequest
    paths = requests.PATHS
    is_slow = staticmethod(requests.is_slow)

    def _model_name(self, parsed: Parsed[Any], call: Call) -> str:
        name, message = super()._model_name(parsed, call), parsed.message
        heads, text = requests.requested_heads(message), message.text
        if name or not (message.HasField("text") or heads):
            return name
        kinds: tuple[ModelKind, ...] = ("encoder",)
        if text.return_labels or text.raw_scores or parsed.contents("text", "pairs"):
            kinds = ("classifier",) if text.return_labels else ("classifier", "late_interaction")
        return default_model(self._engine.repository, call, *kinds, heads=heads)

    def _decode(
        self, parsed: Parsed[Any], model: LoadedModel, deadline: float, allowance: Allowance
    ) -> tuple[DecodedRequest, ReplyTemplate]:
        if (size := len(parsed.id.encode())) > MAX_ID_BYTES:
            raise LimitExceededError("id", f"has {size} bytes; the limit is {MAX_ID_BYTES}")
        message, datatype = parsed.message, requests.output_type(parsed.message)
        if message.inputs:
            names = requests.output_names(message, model)
            decoded, has_batch = requests.decode_named(parsed, model, names, allowance)
            decoded.deadline, prefix = deadline, responses.encode_reply_header(decoded, model)
            encode = partial(
                responses.encode_named, prefix=prefix, names=names, datatype=datatype, has_batch=has_batch
            )
            return decoded, ReplyTemplate(encode)
        heads, has_texts = requests.requested_heads(message), message.HasField("text")
        has_documents = model.context is not None or bool(parsed.contents(TEXT, "pairs"))
        if has_texts and has_documents and model.late_interaction is not None:
            return self._decode_comparison(parsed, model, deadline, allowance)
        # Other encoders refuse pairs as pairs, whatever heads they have.
        has_outputs = model.encoder is None or not has_documents
        outputs = requests.encoder_outputs(message, model) if has_outputs else None
        requests.check_first_output(model)
        decoded = requests.decode(parsed, requests.map_fields_to_inputs(model), allowance)
        decoded.deadline, decoded.encoder_outputs = deadline, outputs
        decoded = tokenize_texts(decoded, model, allowance.limits, allowance.reservation)
        prefix = responses.encode_reply_header(decoded, model, has_texts=has_texts)
        if message.text.return_labels:
            if model.classifier is None:
                problem = f"model: {model.name!r} is not a text classifier"
                raise ModelNotFoundError(problem, field="model_name")
            prefix += pb.AttendResponse(labels=model.classifier.labels).SerializeToString()
        first = (EMBEDDING if EMBEDS in heads else None) if heads else ""
        if message.text.raw_scores and not (first := model.raw_scores_output):
            is_earlier = model.classifier is not None
            problem = "has none: export it again" if is_earlier else "is not a text classifier"
            raise InvalidRequestError("raw_scores", f"model {model.name!r} {problem}")
        output = model.weights_output if decoded.return_weights else None
        weights = "" if output is None else output.name
        encode = partial(
            responses.encode,
            prefix=prefix,
            datatype=datatype,
            first=first,
            largest=requests.quantisation_range(
                model, datatype, decoded.dimensions, normalised=decoded.normalised
            ),
            weights_name=weights,
            token_vectors=CONTEXT_VECTORS if TOKEN_VECTORS in heads else "",
        )
        return decoded, ReplyTemplate(encode)

    def _decode_comparison(
        self, parsed: Parsed[Any], model: LoadedModel, deadline: float, allowance: Allowance
    ) -> tuple[DecodedRequest, ReplyTemplate]:
        """Decodes a request for the scores of pairs, or of queries with stored documents."""
        rule = "pairs or stored documents of a multi-vector encoder, whose response has their scores only"
        requests.check_fields(parsed, requests.FIELDS_ALLOWED_WITH_SCORES, rule)
        if parsed.message.text.return_labels:
            raise InvalidRequestError("return_labels", f"scores of model {model.name!r} have no labels")
        decoded = requests.decode(parsed, {}, allowance)
        decoded.deadline = deadline
        decoded, comparison = tokenize_comparison(decoded, model, *allowance)
        (ids,), cut = decoded.inputs.values(), set(decoded.truncated)
        prefix = responses.encode_reply_header(decoded, model)
        prefix += pb.AttendResponse(
            token_counts=[sum(ids.lengths[at] for at in places) for places in comparison.places],
            truncated=[at for at, places in enumerate(comparison.places) if cut.intersection(places)],
        ).SerializeToString()
        datatype = requests.output_type(parsed.message)
        encode = partial(responses.encode, prefix=prefix, datatype=datatype, first=SCORES)
        return decoded, ReplyTemplate(encode, is_cacheable=False, steps=comparison.steps)


class AttendStream(Attend):
    """Answers one request of a stream."""

    message_type, request_field, is_stream = pb.AttendStreamRequest, "request", True

    def _encode(self, reply: ReplyTemplate, result: Result, request_id: str) -> bytes:
        start = pb.AttendStreamResponse(id=request_id).SerializeToString()
        return b"".join([start, *encode_field(RESPONSE, reply.parts(result))])

    def _leading_id(self, message: bytes) -> str:
        return leading_text(message, pb.AttendStreamRequest.ID_FIELD_NUMBER)

    def _with_reply(self, error: EngineError, request_id: str) -> EngineError:
        stream_error = copy_fields(error, pb.StreamError, code=code_of(error).value[0])
        reply = pb.AttendStreamResponse(id=request_id[:MAX_ID_BYTES], error=stream_error)
        error.reply = reply.SerializeToString()
        return error


class ModelMethod(ABC):
    """A method that works with one model on the codec threads, and may need a run of it.

    Attributes:
        kinds: The kinds of models that may answer a request without the name of one: see `default_model`.
    """

    kinds: ClassVar[tuple[ModelKind, ...]] = ()

    def __init__(
        self, engine: Engine, threads: CodecThreads, kind: Any, paths: Iterable[str], sequences: int
    ) -> None:
        """Creates the method, from the type of its requests, what is extracted, and their largest number."""
        self._engine, self._threads, self._contexts = engine, threads, engine.contexts
        self._parse_message = make_parser(kind, paths, sequences)

    async def handle(self, message: bytes, call: Call, reservation: Reservation) -> bytes:
        """Answers one request."""
        reservation.add(len(message))
        reply: bytes = await self._threads.run(partial(self._work, message, call, reservation), call.deadline)
        return reply

    def _work(self, message: bytes, call: Call, reservation: Reservation) -> Any:
        parsed, repository = parse(self._parse_message, message), self._engine.repository
        name = parsed.message.model_name or (
            default_model(repository, call, *self.kinds) if self.kinds else ""
        )
        model = find_model(repository.ready, call, Right.INFER, name, parsed.message.model_version)
        try:
            return self._answer(parsed, model, call, reservation)
        except Exception as error:
            self._engine.report_failure(model, error, reservation)
            raise

    @abstractmethod
    def _answer(self, parsed: Parsed[Any], model: LoadedModel, call: Call, reservation: Reservation) -> Any:
        """Answers a request to a model on the codec threads."""


class PutContext(ModelMethod):
    """Stores projected rows, or the token vectors of documents: as a context, or to continue one."""

    def __init__(self, engine: Engine, threads: CodecThreads, message_type: Any, reply: Any) -> None:
        """Creates the method, from the types of its requests and replies."""
        most = engine.limits.max_sequences
        super().__init__(engine, threads, message_type, requests.CONTEXT_PATHS, most)
        self._reply = reply

    async def handle(self, message: bytes, call: Call, reservation: Reservation) -> bytes:
        """Answers one request."""
        reservation.add(len(message))
        work = partial(self._work, message, call, reservation)
        model, context, make_tensors, request = await self._threads.run(work, call.deadline)
        if request is not None:
            result = await self._engine.submit_and_wait(request, reservation)
            store = partial(self._contexts.put, model, context, partial(make_tensors, result.outputs))
            await self._threads.run(store, call.deadline)
        reply: bytes = self._reply(context=responses.describe_context(context, model)).SerializeToString()
        return reply

    def _answer(
        self, parsed: Parsed[Any], model: LoadedModel, call: Call, reservation: Reservation
    ) -> PreparedContext:
        message, caller, parent = parsed.message, call.caller, None
        decode = self._decode_rows if model.late_interaction is None else self._decode_documents
        projector = model.projector if model.late_interaction is None else model
        if isinstance(message, pb.AppendContextRequest):
            parent = self._contexts.find(model, parsed.id, caller.name, "id").context
        length = 0 if parent is None else parent.length
        allowance = Allowance(self._engine.limits, reservation)
        content = decode(parsed, projector, length, call, allowance)
        new = Context(
            id=context_id(model, "" if parent is None else parent.id, content.arrays),
            nbytes=(CONTEXT_BYTES if parent is None else parent.nbytes) + content.nbytes,
            length=length + content.length,
            owner=caller.name,
            shared=message.shared if parent is None else parent.shared and parent.owner == caller.name,
            expires_at=time.time() + (message.ttl_seconds or DEFAULT_TTL_SECONDS),
        )
        stored = self._contexts.get(model, new.id, caller.name)
        if stored is not None and stored.context is not None and stored.context.shared >= new.shared:
            if stored.context.owner == caller.name:
                self._contexts.renew(model, stored.context, new.expires_at)
            return PreparedContext(model, stored.context, dict, None)
        self._contexts.check_size(new.nbytes, "key" if model.late_interaction is None else TEXT)
        return PreparedContext(model, new, partial(content.make_tensors, parent), content.request)

    def _decode_rows(
        self, parsed: Parsed[Any], projector: LoadedModel, start: int, call: Call, allowance: Allowance
    ) -> DecodedContext:
        """Decodes rows, the first of which has the position `start`."""
        if parsed.message.HasField(TEXT):
            raise InvalidRequestError(TEXT, f"model {projector.name!r} is not a multi-vector encoder")
        rows, hidden = requests.decode_rows(parsed, allowance)
        positions = np.flatnonzero(~hidden) + start
        if not positions.size:
            raise InvalidRequestError("mask", "hides every row")
        inputs = projected_inputs(projector, rows, positions)
        ragged = {name: Ragged(array, (len(array),)) for name, array in inputs.items()}
        request = self._engine.validate(
            projector, DecodedRequest(inputs=ragged, deadline=call.deadline, caller=call.caller)
        )
        size = request.plan.sequences[0].result_bytes + positions.nbytes
        arrays = {**rows, KEY_POSITIONS: positions}
        return DecodedContext(request, arrays, len(hidden), size, partial(join_tensors, positions))

    def _decode_documents(
        self, parsed: Parsed[Any], model: LoadedModel, _start: int, call: Call, allowance: Allowance
    ) -> DecodedContext:
        """Decodes the documents of a multi-vector encoder."""
        rule = f"model {model.name!r}, a multi-vector encoder: its contexts are documents, sent as text"
        requests.check_fields(parsed, requests.FIELDS_OF_DOCUMENTS, rule)
        texts, pairs = (tuple(parsed.contents(TEXT, name)) for name in ("texts", "pairs"))
        if not texts:
            raise InvalidRequestError(TEXT, "has no documents; at least one is required")
        options = requests.text_options(parsed.message.text)
        decoded = DecodedRequest(
            texts=texts, second_texts=pairs, deadline=call.deadline, caller=call.caller, **options
        )
        decoded, lengths = tokenize_documents(decoded, model, *allowance)
        (ids,) = decoded.inputs.values()
        arrays = {TOKEN_IDS: ids.rows, "token_counts": np.array(ids.lengths), DOCUMENT_LENGTHS: lengths}
        rows, width = int(lengths.sum()), model.outputs[CONTEXT_VECTORS].axes[-1]
        size = FLOAT_BYTES * rows * int(width) + lengths.nbytes
        return DecodedContext(self._engine.validate(model, decoded), arrays, rows, size, join_documents)


class Tokens(ModelMethod):
    """Turns texts into token ids, or token ids into texts, without a run of the model."""

    kinds = ("encoder", "classifier")

    def _answer(self, parsed: Parsed[Any], model: LoadedModel, call: Call, reservation: Reservation) -> bytes:
        is_text = isinstance(parsed.message, pb.TokenizeRequest)
        work = self._encode if is_text else self._decode
        reply = work(parsed, model, call, reservation)
        reply.model_name, reply.model_version = model.name, model.version
        self._check_size(TEXT if is_text else TOKEN_IDS, reply.ByteSize())
        return bytes(reply.SerializeToString())

    def _check_size(self, field: str, size: int) -> None:
        if size > (limit := self._engine.limits.max_result_bytes):
            raise LimitExceededError(field, f"the response would have {size} bytes; the limit is {limit}")

    def _encode(self, parsed: Parsed[Any], model: LoadedModel, call: Call, reservation: Reservation) -> Any:
        text, limits = parsed.message.text, self._engine.limits
        texts, pairs = (tuple(parsed.contents(TEXT, name)) for name in ("texts", "pairs"))
        if not texts:
            raise InvalidRequestError(TEXT, "has no texts; at least one is required")
        options = requests.text_options(text) | {"truncate": text.truncate}
        decoded = DecodedRequest(texts=texts, second_texts=pairs, deadline=call.deadline, **options)
        bounds = TextLimits(limits.max_text_bytes, tokens=limits.max_result_bytes // LEAST_TOKEN_BYTES)
        if text.truncate:
            most = text_limits(model, limits, decoded.input_kind).text_tokens
            bounds = bounds._replace(text_tokens=most)
        adds_special = not parsed.message.omit_special_tokens
        flags = {"offsets": not pairs, "special": True, "adds_special": adds_special}
        encoded = encode_texts(decoded, model, limits, reservation, bounds, ENCODED_BYTES, **flags)
        reservation.add(TOKEN_BYTES * len(encoded.ids.rows))
        ids, lengths = encoded.ids.rows.tolist(), encoded.ids.lengths
        reply = pb.TokenizeResponse(tokens=model.text_tokenizer.texts_of(ids), truncated=encoded.truncated)
        reply.token_ids.MergeFrom(pb.TokenSequences(ids=ids, lengths=lengths))
        reply.special.extend(map(bool, encoded.special))
        if encoded.offsets is not None:
            starts, ends = encoded.offsets.rows.T.tolist()
            reply.token_offsets.MergeFrom(pb.Spans(lengths=lengths, starts=starts, ends=ends))
        return reply

    def _decode(self, parsed: Parsed[Any], model: LoadedModel, call: Call, reservation: Reservation) -> Any:
        ids = requests.decode_token_ids(parsed, Allowance(self._engine.limits, reservation))
        if not ids.lengths or 0 in ids.lengths:
            raise InvalidRequestError(TOKEN_IDS, "has an empty sequence, or none; each needs at least one id")
        self._check_size(TOKEN_IDS, size := model.text_tokenizer.text_bytes(ids.rows))
        reservation.add(TOKEN_BYTES * max(ids.lengths) + 2 * size)
        keeps_special = parsed.message.keep_special_tokens
        texts = model.text_tokenizer.decode(ids, call.deadline, keeps_special=keeps_special)
        return pb.DetokenizeResponse(texts=texts)


def methods(engine: Engine, threads: CodecThreads) -> dict[str, Method]:
    """Each method by its full name.

    Args:
        engine: Computes results, and has the models and the contexts.
        threads: Decode and encode what is large; store, list and drop contexts.
    """
    repository, contexts, most = engine.repository, engine.contexts, engine.limits.max_sequences

    def describe(model: Model) -> pb.Model:
        return responses.describe(model, repository.aliases(model.name))

    def list_models(_request: pb.ListModelsRequest, call: Call) -> pb.ListModelsResponse:
        """Describes the models that the caller may read, those that failed to load included."""
        return pb.ListModelsResponse(models=map(describe, filter_permitted(repository, call)))

    def get_model(request: pb.GetModelRequest, call: Call) -> pb.GetModelResponse:
        model = find_model(repository.find, call, Right.READ, request.name, request.version)
        return pb.GetModelResponse(model=describe(model))

    async def drop(request: pb.DropContextRequest, call: Call) -> None:
        model = find_model(repository.ready, call, Right.INFER, request.model_name, request.model_version)
        await threads.run(partial(contexts.drop, model, request.id, call.caller.name), call.deadline)

    async def list_page(request: pb.ListContextsRequest, call: Call) -> pb.ListContextsResponse:
        model = find_model(repository.ready, call, Right.INFER, request.model_name, request.model_version)
        return await threads.run(partial(_page, engine, model, call.caller.name, request), call.deadline)

    # Of inference, so that an identity's limits hold for them: they take longer with each stored context.
    options: dict[str, Any] = {"is_inference": True, "right": Right.INFER}
    on_models = {
        "PutContext": PutContext(engine, threads, pb.PutContextRequest, pb.PutContextResponse),
        "AppendContext": PutContext(engine, threads, pb.AppendContextRequest, pb.AppendContextResponse),
        "Tokenize": Tokens(engine, threads, pb.TokenizeRequest, requests.PATHS_OF_TEXTS, most),
        "Detokenize": Tokens(engine, threads, pb.DetokenizeRequest, requests.PATHS_OF_IDS, most),
    }
    return {
        f"/{SERVICE.full_name}/Attend": Attend(engine, threads).method(),
        f"/{SERVICE.full_name}/AttendStream": AttendStream(engine, threads).method(),
        **{
            f"/{SERVICE.full_name}/{name}": Method(handle=method.handle, budget=engine.budget, **options)
            for name, method in on_models.items()
        },
        f"/{SERVICE.full_name}/DropContext": control_method(
            pb.DropContextRequest.FromString, drop, **options
        ),
        f"/{SERVICE.full_name}/ListContexts": control_method(
            pb.ListContextsRequest.FromString, list_page, **options
        ),
        **control_methods(SERVICE, Right.READ, ListModels=list_models, GetModel=get_model),
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
        contexts=[responses.describe_context(context, model) for context in contexts],
        next_page_token=str(following) if following else "",
    )

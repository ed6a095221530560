"""The methods of tei.v1: each is one of attention.v1, with the bodies of TEI's JSON as its messages.

A stream is answered like as many calls, and ends with the first that fails. RerankStream is one call.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, TypeVar

from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message_factory import GetMessageClass

from attention_serving.protos.tei.v1 import tei_pb2 as tei
from attention_serving.server import VERSION
from attention_serving.server.api import method, schemas, text_bodies
from attention_serving.server.api.codec_threads import THREADS, CodecThreads
from attention_serving.server.api.method import Method
from attention_serving.server.api.text_bodies import TextBody
from attention_serving.server.engine.budget import Reservation
from attention_serving.server.engine.engine import Engine
from attention_serving.server.engine.errors import InvalidRequestError
from attention_serving.server.engine.limits import UNLIMITED
from attention_serving.server.engine.requests.validation import text_limits
from attention_serving.server.security.rights import Right
from attention_serving.server.transport.call import Call

T = TypeVar("T")
SERVICES = tuple(tei.DESCRIPTOR.services_by_name.values())
# The key of metadata that names the model of a request.
MODEL_ID = "model-id"
# By precision of a model, and by number of labels up to 2, as TEI calls them.
DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "int8": "int8"}
MODEL_TYPES = tei.MODEL_TYPE_EMBEDDING, tei.MODEL_TYPE_RERANKER, tei.MODEL_TYPE_CLASSIFIER
# By the name of a method, without "Stream": the body with the same members, and what makes the reply of its
# answer. Tokens and scores have the members of messages.
FORMS: Mapping[str, tuple[type[TextBody], Callable[[Any], Any]]] = {
    "Embed": (text_bodies.EmbedRequest, lambda rows: tei.EmbedResponse(embeddings=rows[0].tolist())),
    "EmbedSparse": (
        text_bodies.EmbedSparseRequest,
        lambda texts: tei.EmbedSparseResponse(sparse_embeddings=texts[0]),
    ),
    "EmbedAll": (text_bodies.EmbedAllRequest, lambda texts: _token_embeddings(texts[0].tolist())),
    "Predict": (text_bodies.ClassifyRequest, lambda labels: tei.PredictResponse(predictions=labels)),
    "PredictPair": (text_bodies.ClassifyRequest, lambda labels: tei.PredictResponse(predictions=labels)),
    "Rerank": (text_bodies.RankRequest, lambda ranks: tei.RerankResponse(ranks=ranks)),
    "Tokenize": (text_bodies.TokenizeRequest, lambda texts: tei.EncodeResponse(tokens=texts[0])),
    "Decode": (text_bodies.DecodeRequest, lambda texts: tei.DecodeResponse(text=texts[0])),
}


def _token_embeddings(rows: Sequence[Sequence[float]]) -> tei.EmbedAllResponse:
    return tei.EmbedAllResponse(token_embeddings=[tei.TokenEmbedding(embeddings=row) for row in rows])


class Translated:
    """A method, answered by one of attention.v1."""

    def __init__(
        self, rpc: MethodDescriptor, engine: Engine, threads: CodecThreads, targets: Mapping[str, Method]
    ) -> None:
        """Creates the method: see `methods`."""
        self._body, self._make_reply = FORMS[rpc.name.removesuffix("Stream")]
        self._parse_message = GetMessageClass(rpc.input_type).FromString
        self._target, self._engine, self._threads = targets[self._body.rpc[0]], engine, threads

    async def handle(self, message: bytes | Sequence[bytes], call: Call, reservation: Reservation) -> bytes:
        """Answers one request, or those of a stream that has one reply."""
        started, messages = time.monotonic_ns(), [message] if isinstance(message, bytes) else message
        reservation.add(size := sum(map(len, messages)))
        body, question, data = await self._run(partial(self._decode, messages, call), size, call)
        reply = await self._target.handle(data, call, reservation)
        reservation.add(len(reply))
        encode = partial(self._encode, body, question, reply, reservation, started)
        return await self._run(encode, len(reply), call)

    async def _run(self, work: Callable[[], T], size: int, call: Call) -> T:
        return await self._threads.run(work, call.deadline) if size > method.LARGE_BYTES else work()

    def _decode(self, messages: Sequence[bytes], call: Call) -> tuple[TextBody, Any, bytes]:
        """The request as a body and as one of attention.v1, and the latter serialized."""
        members, *later = (
            schemas.to_json(method.parse(self._parse_message, message)) for message in messages
        )
        if "text" in members:  # of a stream, whose requests are those of one
            members["texts"] = [members.pop("text"), *(request["text"] for request in later)]
            if {request["query"] for request in later} - {members["query"]}:
                raise InvalidRequestError("query", "is not the same in all requests of the stream")
        body = schemas.check(members, self._body)
        body.model = _model_id(call)
        question = body.message(self._engine.limits.max_input_bytes)
        return body, question, question.SerializeToString()

    def _encode(
        self, body: TextBody, question: Any, data: bytes, reservation: Reservation, started: int
    ) -> bytes:
        reply = body.rpc[1].FromString(data)
        document = self._make_reply(body.document([reply], reservation))
        if "metadata" in document.DESCRIPTOR.fields_by_name:
            texts = chain(question.text.texts, question.text.pairs)
            document.metadata.compute_chars = sum(map(len, texts))
            document.metadata.compute_tokens = sum(reply.token_counts)
            document.metadata.total_time_ns = time.monotonic_ns() - started
        return bytes(document.SerializeToString())


def methods(
    engine: Engine, threads: CodecThreads, targets: Mapping[str, Method], max_calls: int
) -> dict[str, Method]:
    """Each method by its full name.

    Args:
        engine: Has the models, the limits and the memory of requests.
        threads: Translate what is large.
        targets: The methods of attention.v1.
        max_calls: Most calls of inference at a time.
    """
    repository, limits = engine.repository, engine.limits

    def info(_request: tei.InfoRequest, call: Call) -> tei.InfoResponse:
        name = _model_id(call) or method.default_model(repository, call, "encoder", "classifier")
        model = method.find_model(repository.ready, call, Right.INFER, name, "")
        labels = () if model.classifier is None else model.classifier.labels
        if not (model.encoder or labels):
            raise InvalidRequestError(MODEL_ID, f"{model.name!r} is not a text encoder or classifier")
        model_type, dtype = MODEL_TYPES[min(len(labels), 2)], DTYPES[model.manifest.precision]
        reply = tei.InfoResponse(version=VERSION, model_id=model.name, model_sha=model.digest)
        reply.model_dtype, reply.model_type, reply.max_concurrent_requests = dtype, model_type, max_calls
        reply.max_input_length = text_limits(model, limits).text_tokens
        reply.max_batch_tokens = 0 if limits.max_batch_rows == UNLIMITED else limits.max_batch_rows
        reply.max_batch_requests = limits.max_batch_sequences
        reply.max_client_batch_size, reply.tokenization_workers = limits.max_sequences, THREADS
        return reply

    options: dict[str, Any] = {"is_inference": True, "right": Right.INFER, "budget": engine.budget}
    rpcs = [rpc for service in SERVICES for rpc in service.methods if rpc.name != "Info"]
    return method.control_methods(SERVICES[0], Right.INFER, Info=info) | {
        f"/{rpc.containing_service.full_name}/{rpc.name}": Method(
            kind=method.CALL_KINDS[rpc.client_streaming, rpc.server_streaming],
            handle=Translated(rpc, engine, threads, targets).handle,
            **options,
        )
        for rpc in rpcs
    }


def _model_id(call: Call) -> str:
    return str(dict(call.metadata).get(MODEL_ID, ""))

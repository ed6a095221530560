"""Tokenize and Detokenize: from texts to token ids and back, with the tokenizer of a model."""

from abc import ABC, abstractmethod
from functools import partial
from typing import Any, ClassVar

from attention_serving.protos.attention.v1 import attention_pb2 as pb
from attention_serving.server.api.attention.requests import decode_token_ids, text_options
from attention_serving.server.api.codec_threads import CodecThreads
from attention_serving.server.api.method import default_model, find_model, parse
from attention_serving.server.api.tensors import Allowance
from attention_serving.server.api.wire import Parsed, make_parser
from attention_serving.server.engine.budget import Reservation
from attention_serving.server.engine.engine import Engine
from attention_serving.server.engine.errors import InvalidRequestError, LimitExceededError
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.requests.tokenizer import TEXT, TOKEN_IDS, TextLimits
from attention_serving.server.engine.requests.validation import encode_texts, text_limits
from attention_serving.server.engine.types import DecodedRequest
from attention_serving.server.security.rights import Right
from attention_serving.server.transport.call import Call

# Memory of a token while texts are encoded, and in the reply, with its Python objects.
ENCODED_BYTES, TOKEN_BYTES = 32, 192
# Bytes of a token in a reply at least.
LEAST_TOKEN_BYTES = 8


class _TokenMethod(ABC):
    """A method that needs the tokenizer of a model, and no run. Its work is done on the codec threads."""

    message_type: ClassVar[Any]
    paths: ClassVar[tuple[str, ...]]
    # The field with the texts or ids.
    field: ClassVar[str]

    def __init__(self, engine: Engine, threads: CodecThreads) -> None:
        """Creates the method."""
        self._engine, self._threads, self._limits = engine, threads, engine.limits
        self._parse_message = make_parser(self.message_type, self.paths, engine.limits.max_sequences)

    async def handle(self, message: bytes, call: Call, reservation: Reservation) -> bytes:
        """Answers one request."""
        reservation.add(len(message))
        return await self._threads.run(partial(self._work, message, call, reservation), call.deadline)

    def _work(self, message: bytes, call: Call, reservation: Reservation) -> bytes:
        parsed, repository = parse(self._parse_message, message), self._engine.repository
        name = parsed.message.model_name or default_model(repository, call, "encoder", "classifier")
        model = find_model(repository.ready, call, Right.INFER, name, parsed.message.model_version)
        try:
            reply = self._answer(parsed, model, Allowance(self._limits, reservation), call.deadline)
            reply.model_name, reply.model_version = model.name, model.version
            self._check_size(reply.ByteSize())
            return bytes(reply.SerializeToString())
        except Exception as error:
            self._engine.report_failure(model, error, reservation)
            raise

    def _check_size(self, size: int) -> None:
        if size > (limit := self._limits.max_result_bytes):
            raise LimitExceededError(
                self.field, f"the response would have {size} bytes; the limit is {limit}"
            )

    @abstractmethod
    def _answer(self, parsed: Parsed[Any], model: LoadedModel, allowance: Allowance, deadline: float) -> Any:
        """The reply, without the name of the model."""


class Tokenize(_TokenMethod):
    """Turns texts into token ids."""

    message_type, paths, field = pb.TokenizeRequest, ("text.texts", "text.pairs"), TEXT

    def _answer(
        self, parsed: Parsed[Any], model: LoadedModel, allowance: Allowance, deadline: float
    ) -> pb.TokenizeResponse:
        text, limits = parsed.message.text, self._limits
        texts, pairs = (tuple(parsed.contents("text", name)) for name in ("texts", "pairs"))
        if not texts:
            raise InvalidRequestError(TEXT, "has no texts; at least one is required")
        options = text_options(text) | {"truncate": text.truncate}
        decoded = DecodedRequest(texts=texts, second_texts=pairs, deadline=deadline, **options)
        bounds = TextLimits(limits.max_text_bytes, tokens=limits.max_result_bytes // LEAST_TOKEN_BYTES)
        if text.truncate:
            bounds = bounds._replace(text_tokens=text_limits(model, limits).text_tokens)
        encoded = encode_texts(
            decoded,
            model,
            limits,
            allowance.reservation,
            bounds,
            ENCODED_BYTES,
            offsets=not pairs,
            special=True,
            adds_special=not parsed.message.omit_special_tokens,
        )
        allowance.reservation.add(TOKEN_BYTES * len(encoded.ids.rows))
        ids, lengths = encoded.ids.rows.tolist(), encoded.ids.lengths
        reply = pb.TokenizeResponse(
            token_ids=pb.TokenSequences(ids=ids, lengths=lengths),
            tokens=model.text_tokenizer.texts_of(ids),
            special=map(bool, encoded.special),
            truncated=encoded.truncated,
        )
        if encoded.offsets is not None:
            starts, ends = encoded.offsets.rows.T.tolist()
            reply.token_offsets.MergeFrom(pb.Spans(lengths=lengths, starts=starts, ends=ends))
        return reply


class Detokenize(_TokenMethod):
    """Turns token ids into texts."""

    message_type, paths, field = pb.DetokenizeRequest, ("token_ids.ids", "token_ids.lengths"), TOKEN_IDS

    def _answer(
        self, parsed: Parsed[Any], model: LoadedModel, allowance: Allowance, deadline: float
    ) -> pb.DetokenizeResponse:
        ids, tokenizer = decode_token_ids(parsed, allowance), model.text_tokenizer
        if not ids.lengths or 0 in ids.lengths:
            raise InvalidRequestError(TOKEN_IDS, "has an empty sequence, or none; each needs at least one id")
        self._check_size(size := tokenizer.text_bytes(ids.rows))
        allowance.reservation.add(TOKEN_BYTES * max(ids.lengths) + 2 * size)
        keeps_special = parsed.message.keep_special_tokens
        return pb.DetokenizeResponse(texts=tokenizer.decode(ids, deadline, keeps_special=keeps_special))

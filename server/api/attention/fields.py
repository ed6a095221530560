"""The fields of attention.v1 requests that are cut out of their messages."""

from collections.abc import Callable

from attention_serving.protos.attention.v1 import attention_pb2 as pb
from attention_serving.server.api import protobuf_bytes
from attention_serving.server.api.protobuf_bytes import Bounds, Fields, Parsed, Submessage
from attention_serving.server.api.request_cache import KnownFields
from attention_serving.server.engine.limits import Limits
from attention_serving.server.engine.requests.tokenizer import FEW_TEXTS, LITTLE_TEXT_BYTES

TEXTS = ("text", "texts")
VECTORS = ("query.data", "key.data", "value.data", "inputs.data")
LENGTHS = ("query.lengths", "key.lengths", "value.lengths", "token_ids.lengths", "embedding.spans.lengths")
NUMBERS = ("token_ids.ids", "positions", "embedding.spans.starts", "embedding.spans.ends", "inputs.shapes")
REQUEST_PATHS = (*VECTORS, *LENGTHS, *NUMBERS, "text.texts", "mask.bits")
REQUEST = Submessage.of(pb.AttendRequest.DESCRIPTOR, REQUEST_PATHS)
STREAMED_REQUEST = Submessage.of(
    pb.AttendStreamRequest.DESCRIPTOR, [f"request.{path}" for path in REQUEST_PATHS]
)
# The fields in which requests may differ that are otherwise the same; and the same in a stream, with the id.
KNOWN_FIELDS = Submessage.of(pb.AttendRequest.DESCRIPTOR, VECTORS)
STREAMED_ID = ("id",)
KNOWN_STREAMED_FIELDS = Submessage.of(
    pb.AttendStreamRequest.DESCRIPTOR, ["id", *[f"request.{path}" for path in VECTORS]]
)
KNOWN, KNOWN_STREAMED = KnownFields(KNOWN_FIELDS, ()), KnownFields(KNOWN_STREAMED_FIELDS, STREAMED_ID)
# The same of replies.
OUTPUTS = ("context_vectors.data", "attention_weights.data", "outputs.data")
KNOWN_REPLY = KnownFields(Submessage.of(pb.AttendResponse.DESCRIPTOR, OUTPUTS), ())
KNOWN_STREAMED_REPLY = KnownFields(
    Submessage.of(pb.AttendStreamResponse.DESCRIPTOR, ["id", *[f"response.{path}" for path in OUTPUTS]]),
    STREAMED_ID,
)


def reader(limits: Limits) -> Callable[[bytes], Parsed[pb.AttendRequest]]:
    """A function that parses requests within the limits."""
    bounds = Bounds.for_sequences(limits.max_sequences)
    return protobuf_bytes.reader(pb.AttendRequest.FromString, REQUEST, bounds)


def streamed_reader(limits: Limits) -> Callable[[bytes], Parsed[pb.AttendStreamRequest]]:
    """A function that parses requests of a stream within the limits. The fields are those of `request`."""
    bounds = Bounds.for_sequences(limits.max_sequences)
    read = protobuf_bytes.reader(pb.AttendStreamRequest.FromString, STREAMED_REQUEST, bounds)

    def read_streamed(data: bytes) -> Parsed[pb.AttendStreamRequest]:
        parsed = read(data)
        return parsed._replace(fields={path[1:]: found for path, found in parsed.fields.items()})

    return read_streamed


def is_slow(request: Parsed[pb.AttendRequest]) -> bool:
    """Whether a request takes long to decode even if it is not large: much text, many texts, or spans."""
    return _is_slow(request.message, request.fields)


def is_slow_streamed(request: Parsed[pb.AttendStreamRequest]) -> bool:
    """Whether a request of a stream takes long to decode even if it is not large."""
    return _is_slow(request.message.request, request.fields)


def _is_slow(message: pb.AttendRequest, fields: Fields) -> bool:
    texts = fields.get(TEXTS, ())
    is_long = len(texts) > FEW_TEXTS or sum(map(len, texts)) > LITTLE_TEXT_BYTES
    return is_long or (bool(texts) and message.embedding.HasField("spans"))

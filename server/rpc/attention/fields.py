"""The fields of attention.v1 requests that are cut out of large messages."""

from collections.abc import Callable

from attention_serving.protos.attention.v1 import attention_pb2 as pb
from attention_serving.server.engine.limits import Limits
from attention_serving.server.engine.tokenizer import FEW_TEXTS
from attention_serving.server.rpc import protobuf_bytes
from attention_serving.server.rpc.protobuf_bytes import CONTENT, FLOATS, VARINTS, Bounds, Parsed, Submessage
from attention_serving.server.rpc.request_cache import KnownFields

QUERY = pb.AttendRequest.QUERY_FIELD_NUMBER
KEY = pb.AttendRequest.KEY_FIELD_NUMBER
VALUE = pb.AttendRequest.VALUE_FIELD_NUMBER
TOKEN_IDS = pb.AttendRequest.TOKEN_IDS_FIELD_NUMBER
TEXT = pb.AttendRequest.TEXT_FIELD_NUMBER
POSITIONS_OF_ROWS = pb.AttendRequest.POSITIONS_FIELD_NUMBER
VECTOR_LENGTHS = pb.VectorSequences.LENGTHS_FIELD_NUMBER
VECTOR_DATA = pb.VectorSequences.DATA_FIELD_NUMBER
INPUTS = pb.AttendRequest.INPUTS_FIELD_NUMBER
TENSOR_SHAPES = pb.NamedTensors.SHAPES_FIELD_NUMBER
TENSOR_DATA = pb.NamedTensors.DATA_FIELD_NUMBER
TOKEN_LENGTHS = pb.TokenSequences.LENGTHS_FIELD_NUMBER
IDS = pb.TokenSequences.IDS_FIELD_NUMBER
TEXTS = pb.TextSequences.TEXTS_FIELD_NUMBER
SPANS = (pb.AttendRequest.EMBEDDING_FIELD_NUMBER, pb.EmbeddingOptions.SPANS_FIELD_NUMBER)
SPAN_LENGTHS = (*SPANS, pb.Spans.LENGTHS_FIELD_NUMBER)
SPAN_STARTS = (*SPANS, pb.Spans.STARTS_FIELD_NUMBER)
SPAN_ENDS = (*SPANS, pb.Spans.ENDS_FIELD_NUMBER)
MASK_BITS = (pb.AttendRequest.MASK_FIELD_NUMBER, pb.AttentionMask.BITS_FIELD_NUMBER)
SPANS_FIELDS = Submessage({SPAN_LENGTHS[-1]: VARINTS, SPAN_STARTS[-1]: FLOATS, SPAN_ENDS[-1]: FLOATS})
VECTORS = Submessage({VECTOR_LENGTHS: VARINTS, VECTOR_DATA: CONTENT})
REQUEST = Submessage(
    {
        QUERY: VECTORS,
        TOKEN_IDS: Submessage({TOKEN_LENGTHS: VARINTS, IDS: VARINTS}),
        TEXT: Submessage({TEXTS: CONTENT}),
        KEY: VECTORS,
        VALUE: VECTORS,
        pb.AttendRequest.MASK_FIELD_NUMBER: Submessage({pb.AttentionMask.BITS_FIELD_NUMBER: CONTENT}),
        POSITIONS_OF_ROWS: VARINTS,
        pb.AttendRequest.EMBEDDING_FIELD_NUMBER: Submessage({SPANS[-1]: SPANS_FIELDS}),
        INPUTS: Submessage({TENSOR_SHAPES: VARINTS, TENSOR_DATA: CONTENT}, repeated=True),
    },
    oneof=frozenset({QUERY, TOKEN_IDS, TEXT}),
)
# The fields in which requests may differ that are otherwise the same; and the same in a stream, with the id.
KNOWN_VECTORS = {QUERY: "query", KEY: "key", VALUE: "value"}
KNOWN_FIELDS = Submessage(
    {
        **dict.fromkeys(KNOWN_VECTORS, Submessage({VECTOR_DATA: CONTENT})),
        INPUTS: Submessage({TENSOR_DATA: CONTENT}, repeated=True),
    }
)
STREAMED_ID = (pb.AttendStreamRequest.ID_FIELD_NUMBER,)
KNOWN_STREAMED_FIELDS = Submessage(
    {STREAMED_ID[0]: CONTENT, pb.AttendStreamRequest.REQUEST_FIELD_NUMBER: KNOWN_FIELDS}
)
KNOWN = KnownFields(KNOWN_FIELDS, ())
KNOWN_STREAMED = KnownFields(KNOWN_STREAMED_FIELDS, STREAMED_ID)
# The same of replies.
_OUTPUTS = Submessage(
    {
        pb.AttendResponse.CONTEXT_VECTORS_FIELD_NUMBER: Submessage(
            {pb.VectorSequences.DATA_FIELD_NUMBER: CONTENT}
        ),
        pb.AttendResponse.ATTENTION_WEIGHTS_FIELD_NUMBER: Submessage(
            {pb.AttentionWeights.DATA_FIELD_NUMBER: CONTENT}
        ),
        pb.AttendResponse.OUTPUTS_FIELD_NUMBER: Submessage({TENSOR_DATA: CONTENT}, repeated=True),
    }
)
_STREAMED_REPLY_ID = (pb.AttendStreamResponse.ID_FIELD_NUMBER,)
KNOWN_REPLY = KnownFields(_OUTPUTS, ())
KNOWN_STREAMED_REPLY = KnownFields(
    Submessage({_STREAMED_REPLY_ID[0]: CONTENT, pb.AttendStreamResponse.RESPONSE_FIELD_NUMBER: _OUTPUTS}),
    _STREAMED_REPLY_ID,
)
STREAMED_REQUEST = Submessage({pb.AttendStreamRequest.REQUEST_FIELD_NUMBER: REQUEST})


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
        if not parsed.fields:
            return parsed
        return parsed._replace(fields={path[1:]: found for path, found in parsed.fields.items()})

    return read_streamed


def is_slow(request: Parsed[pb.AttendRequest]) -> bool:
    """Whether a request takes long to decode even if it is not large: much text, many texts, or spans."""
    return _is_slow(request.message, is_cut=bool(request.fields))


def is_slow_streamed(request: Parsed[pb.AttendStreamRequest]) -> bool:
    """Whether a request of a stream takes long to decode even if it is not large."""
    return _is_slow(request.message.request, is_cut=bool(request.fields))


def _is_slow(message: pb.AttendRequest, *, is_cut: bool) -> bool:
    if not message.HasField("text"):
        return False
    return is_cut or len(message.text.texts) > FEW_TEXTS or message.embedding.HasField("spans")

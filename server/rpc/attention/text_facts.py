"""What a response of attention.v1 says about the texts of its request."""

from typing import NamedTuple, Self

import numpy as np

from attention_serving.protos.attention.v1 import attention_pb2 as pb
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.types import Ragged, Request
from attention_serving.server.rpc import protobuf_bytes
from attention_serving.server.rpc.tensors import to_bytes

OFFSET_STARTS = (pb.AttendResponse.TOKEN_OFFSETS_FIELD_NUMBER, pb.Spans.STARTS_FIELD_NUMBER)
OFFSET_ENDS = (pb.AttendResponse.TOKEN_OFFSETS_FIELD_NUMBER, pb.Spans.ENDS_FIELD_NUMBER)
OFFSET_TYPE = np.dtype("<u4")


class TextFacts(NamedTuple):
    """What a response says about the texts of its request.

    Attributes:
        token_counts: Number of tokens of each text; empty if the request had no texts, or not to an encoder.
        truncated: Indices of the texts that were cut.
        offsets: The characters of each token; None unless the request asked for them.
    """

    token_counts: tuple[int, ...] = ()
    truncated: tuple[int, ...] = ()
    offsets: Ragged | None = None

    @classmethod
    def of(cls, request: Request, model: LoadedModel) -> Self:
        """The facts of a request whose texts have been encoded."""
        if model.encoder is None:
            return cls(offsets=request.offsets)
        return cls(request.inputs[model.inputs[0].name].lengths, request.truncated, request.offsets)

    def serialized(self) -> bytes:
        """The fields of an AttendResponse."""
        if not self.token_counts and self.offsets is None:
            return b""
        fields = pb.AttendResponse(token_counts=self.token_counts, truncated=self.truncated)
        if self.offsets is None:
            return fields.SerializeToString()
        fields.token_offsets.lengths.extend(self.offsets.lengths)
        starts, ends = (column.astype(OFFSET_TYPE) for column in self.offsets.rows.T)
        numbers = [
            *protobuf_bytes.field(OFFSET_STARTS, to_bytes([starts])),
            *protobuf_bytes.field(OFFSET_ENDS, to_bytes([ends])),
        ]
        return b"".join([fields.SerializeToString(), *numbers])


NO_FACTS = TextFacts()

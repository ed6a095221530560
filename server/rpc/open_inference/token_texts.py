"""The output `tokens` of models that take text: each token's text, BYTES (B, T), padded with empty texts."""

import struct
from typing import NamedTuple

import numpy as np

from attention_serving.server.engine.errors import LimitExceededError
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.types import Request
from attention_serving.server.rpc.tensors import Allowance

TOKENS = "tokens"
LENGTH = struct.Struct("<I")
EMPTY = LENGTH.pack(0)


class TokenTexts(NamedTuple):
    """The tokens of a request.

    Attributes:
        shape: (B, T).
        content: The texts, each after its length in bytes.
    """

    shape: tuple[int, int]
    content: bytes


def has_tokens(model: LoadedModel) -> bool:
    """Whether requests to a model may ask for tokens. An output of its own with this name comes first."""
    return model.text_encoder is not None and TOKENS not in model.outputs


def token_texts(request: Request, model: LoadedModel, length: int, allowance: Allowance) -> TokenTexts:
    """The texts of the tokens of a request.

    Args:
        request: A request with token ids.
        model: Its model, which takes text.
        length: Tokens of each sequence with padding; 0 for those of the longest.
        allowance: What the response may take.

    Raises:
        LimitExceededError: The texts would be too large.
        OverloadedError: Their memory is not available.
    """
    ids, encoder = request.inputs.get(model.inputs[0].name), model.text_encoder
    if ids is None or encoder is None or ids.rows.dtype.kind not in "iu":
        return TokenTexts((0, 0), b"")  # the request is refused when it is validated
    length = length or max(ids.lengths, default=0)
    # A text has far fewer different tokens than tokens, and so have all texts of a request.
    different, places = np.unique(ids.rows, return_inverse=True)
    elements = [_element(text) for text in encoder.texts_of(different.tolist())]
    sizes = np.array([len(element) for element in elements], np.int64)
    padding = len(ids.lengths) * length - len(ids.rows)
    size = int(sizes[places].sum()) + padding * LENGTH.size
    if size > (most := allowance.limits.max_result_bytes):
        raise LimitExceededError(f"outputs[{TOKENS}]", f"would have {size} bytes; the limit is {most}")
    allowance.reserve(size)
    return TokenTexts((len(ids.lengths), length), _content(elements, places.tolist(), ids.lengths, length))


def _content(elements: list[bytes], places: list[int], lengths: tuple[int, ...], length: int) -> bytes:
    parts, start = [], 0
    for own in lengths:
        parts += [elements[place] for place in places[start : start + own]]
        parts.append(EMPTY * (length - own))
        start += own
    return b"".join(parts)


def _element(text: str) -> bytes:
    encoded = text.encode(errors="replace")
    return LENGTH.pack(len(encoded)) + encoded

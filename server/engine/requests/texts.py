"""The token ids of a request that contains texts, within the limits of the server and the model."""

import dataclasses

from attention_serving.artifact.manifest import GraphKind
from attention_serving.server.engine.budget import Reservation
from attention_serving.server.engine.errors import InvalidRequestError
from attention_serving.server.engine.limits import Limits
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.requests.outputs import token_spans
from attention_serving.server.engine.requests.tokenizer import TEXT, TextLimits
from attention_serving.server.engine.types import Request

TOKEN_BYTES, OFFSET_BYTES = 8, 8
PROMPT, TRUNCATE, RETURN_OFFSETS = "prompt", "truncate", "return_offsets"


def encode_texts(
    request: Request, model: LoadedModel, limits: Limits, reservation: Reservation | None = None
) -> Request:
    """The request with token ids in place of its texts; the same request if it does not contain texts.

    Args:
        request: A decoded request.
        model: The requested model.
        limits: The server's limits, which hold while the texts are encoded.
        reservation: Receives the memory of the token ids and offsets before they are made.

    Raises:
        InvalidRequestError: The model does not take the texts, or a span is not a part of one.
        LimitExceededError: There are too many texts, or they are too long.
        DeadlineExceededError: The deadline passed before all texts were encoded.
        OverloadedError: The memory of the token ids is not available.
    """
    if not request.texts:
        _check_without_texts(request)
        return request
    if request.inputs:
        raise InvalidRequestError(
            TEXT, f"cannot be combined with {', '.join(request.inputs)}; send one of them"
        )
    if model.text_encoder is None:
        raise InvalidRequestError(
            TEXT, f"model {model.name!r} takes {', '.join(model.inputs_by_name)}, not text"
        )
    limits.check_sequences(TEXT, len(request.texts))
    bounds = _text_limits(model, limits)
    prefix, truncates = _prompt(request, model), request.truncate
    if truncates is None:
        truncates = model.encoder is not None and model.encoder.truncates
    offsets = request.return_offsets or request.spans is not None
    if reservation is not None:
        characters = sum(map(len, request.texts)) + len(prefix) * len(request.texts)
        token_bytes = TOKEN_BYTES + (OFFSET_BYTES if offsets else 0)
        reservation.add(token_bytes * min(bounds.tokens, characters))
    encoded = model.text_encoder.encode(
        request.texts,
        bounds,
        request.deadline,
        prefix=prefix,
        truncates=truncates,
        offsets=offsets,
    )
    return dataclasses.replace(
        request,
        texts=(),
        inputs={model.inputs[0].name: encoded.ids},
        prompt=None,
        truncate=None,
        truncated=encoded.truncated,
        spans=None if request.spans is None else token_spans(request.spans, encoded),
        return_offsets=False,
        offsets=encoded.offsets if request.return_offsets else None,
    )


def _check_without_texts(request: Request) -> None:
    """Refuses what only texts have."""
    for field, is_given in (
        (PROMPT, request.prompt is not None),
        (TRUNCATE, request.truncate is not None),
        (RETURN_OFFSETS, request.return_offsets),
    ):
        if is_given:
            raise InvalidRequestError(field, "needs text; the request has none")


def _prompt(request: Request, model: LoadedModel) -> str:
    """The text that is put before each text of a request."""
    prompts = model.encoder.prompts if model.encoder else {}
    name = request.prompt
    if name is None:
        name = model.encoder.default_prompt if model.encoder else ""
    if name and name not in prompts:
        known = f"must be one of {', '.join(prompts)}" if prompts else f"model {model.name!r} has no prompts"
        raise InvalidRequestError(PROMPT, f"is {name[:100]!r}; {known}")
    return prompts[name] if name else ""


def _text_limits(model: LoadedModel, limits: Limits) -> TextLimits:
    """Bounds of texts whose token ids and results are within the limits."""
    one, two = (model.shape(GraphKind.PLAIN, (rows,) * len(model.axes)).result_bytes for rows in (1, 2))
    tokens = limits.max_input_bytes // TOKEN_BYTES
    if row_bytes := two - one:  # of outputs with a row for each token
        tokens = min(tokens, limits.max_result_bytes // row_bytes)
    own = model.manifest.max_lengths.get(model.axes[0], limits.max_sequence_length)
    return TextLimits(limits.max_text_bytes, min(own, limits.max_sequence_length), tokens)

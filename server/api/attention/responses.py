"""Responses of attention.v1: the results of requests, models and stored contexts."""

from collections.abc import Iterable, Sequence
from itertools import chain

import numpy as np

from attention_serving.artifact.encoder import CONTEXT_VECTORS, QUANTISED
from attention_serving.artifact.manifest import GraphKind, TensorSpec
from attention_serving.protos.attention.v1 import attention_pb2 as pb
from attention_serving.server.api.attention.requests import ENUM_BY_NAME, UINT32
from attention_serving.server.api.tensors import NAME_BY_DTYPE, OutputPlaceholder, TemplatePart, datatype_of
from attention_serving.server.api.wire import copy_fields, field_header
from attention_serving.server.engine.facts import TOKEN_VECTORS
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.models.repository import FailedModel, Model
from attention_serving.server.engine.types import (
    SPARSE_INDICES,
    SPARSE_VALUES,
    Array,
    Context,
    DecodedRequest,
    Result,
)

CONTEXT_DATA = (pb.AttendResponse.CONTEXT_VECTORS_FIELD_NUMBER, pb.VectorSequences.DATA_FIELD_NUMBER)
WEIGHTS_DATA = (pb.AttendResponse.ATTENTION_WEIGHTS_FIELD_NUMBER, pb.AttentionWeights.DATA_FIELD_NUMBER)
OFFSET_STARTS = (pb.AttendResponse.TOKEN_OFFSETS_FIELD_NUMBER, pb.Spans.STARTS_FIELD_NUMBER)
OFFSET_ENDS = (pb.AttendResponse.TOKEN_OFFSETS_FIELD_NUMBER, pb.Spans.ENDS_FIELD_NUMBER)
TOKEN_DATA = (pb.AttendResponse.TOKEN_VECTORS_FIELD_NUMBER, pb.VectorSequences.DATA_FIELD_NUMBER)
SPARSE_IDS = (pb.AttendResponse.SPARSE_EMBEDDINGS_FIELD_NUMBER, pb.SparseVectors.INDICES_FIELD_NUMBER)
SPARSE_WEIGHTS = (pb.AttendResponse.SPARSE_EMBEDDINGS_FIELD_NUMBER, pb.SparseVectors.VALUES_FIELD_NUMBER)
OUTPUTS, DATA = (pb.AttendResponse.OUTPUTS_FIELD_NUMBER,), (pb.NamedTensors.DATA_FIELD_NUMBER,)


def encode_reply_header(decoded: DecodedRequest, model: LoadedModel, *, has_texts: bool = False) -> bytes:
    """What is known of the response to a request before the run: an AttendResponse.

    Args:
        decoded: The request; its texts are token ids.
        model: The model.
        has_texts: Whether it had texts.
    """
    response = pb.AttendResponse(
        model_name=model.name, model_version=model.version, model_digest=model.digest
    )
    if has_texts and (model.encoder or model.classifier) is not None:
        response.token_counts.extend(decoded.inputs[model.inputs[0].name].lengths)
        response.truncated.extend(decoded.truncated)
    bounds = b""
    if decoded.offsets is not None:
        response.token_offsets.lengths.extend(decoded.offsets.lengths)
        for path, column in zip((OFFSET_STARTS, OFFSET_ENDS), decoded.offsets.rows.T, strict=True):
            content = column.astype(UINT32).tobytes()
            bounds += field_header(path, len(content)) + content
    return response.SerializeToString() + bounds


def encode(
    result: Result,
    prefix: bytes,
    datatype: str = "FP32",
    *,
    first: str | None = "",
    largest: float = 1.0,
    weights_name: str = "",
    token_vectors: str = "",
) -> list[TemplatePart]:
    """A response, for `ReplyTemplate`.

    Args:
        result: The outputs of each sequence.
        prefix: The result of `encode_reply_header`.
        datatype: The type of real numbers in the response.
        first: The output in place of context vectors, if the request asked for another; None without them.
        largest: See `OutputPlaceholder`.
        weights_name: The output with attention weights; empty if the request did not ask for them.
        token_vectors: The output with token vectors, if the request asked for them beside others.
    """
    response, outputs = pb.AttendResponse(), result.outputs
    contents = list[TemplatePart]()

    def add(path: tuple[int, ...], arrays: Sequence[Array], output: OutputPlaceholder) -> None:
        contents.extend([field_header(path, output.size(arrays)), output])

    if first is not None:
        first = first or (CONTEXT_VECTORS if CONTEXT_VECTORS in outputs else next(iter(outputs)))
    # Only embeddings are quantised.
    token_type = "FP32" if datatype in QUANTISED else datatype
    for name, vectors, path, element_type in (
        (first, response.context_vectors, CONTEXT_DATA, datatype),
        (token_vectors, response.token_vectors, TOKEN_DATA, token_type),
    ):
        if name:
            # The first output of a non-attention module may be one row for each sequence.
            rows = [np.atleast_2d(array) for array in outputs[name]]
            vectors.data_type = ENUM_BY_NAME[datatype_of(rows[0], element_type)]
            vectors.width = rows[0].shape[-1]
            vectors.lengths.extend([len(array) for array in rows])
            add(path, rows, OutputPlaceholder(name, element_type, largest=largest))
    if SPARSE_INDICES in outputs:
        response.sparse_embeddings.lengths.extend(map(len, outputs[SPARSE_INDICES]))
        for name, path in ((SPARSE_INDICES, SPARSE_IDS), (SPARSE_VALUES, SPARSE_WEIGHTS)):
            add(path, outputs[name], OutputPlaceholder(name))
    if weights := outputs.get(weights_name, ()):
        *layers, heads = weights[0].shape[:-2] or (1,)  # those of an encoder have layers
        response.attention_weights.MergeFrom(
            pb.AttentionWeights(
                data_type=ENUM_BY_NAME[datatype_of(weights[0], datatype)],
                num_layers=layers[0] if layers else 0,
                num_heads=heads,
                query_lengths=[array.shape[-2] for array in weights],
                key_lengths=[array.shape[-1] for array in weights],
            )
        )
        add(WEIGHTS_DATA, weights, OutputPlaceholder(weights_name, datatype))
    return [prefix + response.SerializeToString(), *contents]


def encode_named(
    result: Result, prefix: bytes, names: Sequence[str], datatype: str = "FP32", *, has_batch: bool
) -> list[TemplatePart]:
    """A response with outputs by name, for `ReplyTemplate`.

    Args:
        result: The outputs of each sequence.
        prefix: The result of `encode_reply_header`.
        names: The requested outputs.
        datatype: The type of real numbers in the response.
        has_batch: Whether each output is one tensor with the batch axis.
    """
    parts: list[TemplatePart] = [prefix]
    for name in names:
        arrays, output = result.outputs[name], OutputPlaceholder(name, datatype)
        shapes = [(len(arrays), *arrays[0].shape)] if has_batch else [array.shape for array in arrays]
        tensors = pb.NamedTensors(
            name=name,
            data_type=ENUM_BY_NAME[datatype_of(arrays[0], datatype)],
            num_tensors=len(shapes),
            shapes=chain.from_iterable(shapes),
        ).SerializeToString()
        size = output.size(arrays)
        before = tensors + field_header(DATA, size)
        parts += [field_header(OUTPUTS, len(before) + size) + before, output]
    return parts


def describe(model: Model, aliases: Iterable[str] = ()) -> pb.Model:
    """Describes a model, loaded or failed, that requests reach under some aliases too."""
    if isinstance(model, FailedModel):
        state, reason = pb.Model.STATE_FAILED, model.reason
        return pb.Model(
            name=model.name, version=model.version, state=state, state_reason=reason, aliases=aliases
        )
    manifest, encoder, classifier = model.manifest, model.encoder, model.classifier
    inputs = [_tensor(spec, model, optional=spec.name in model.optional_inputs) for spec in model.inputs]
    if GraphKind.MASK in manifest.graphs:
        inputs.append(_tensor(manifest.graphs[GraphKind.MASK].inputs[-1], model, optional=True))
    inputs += [_tensor(spec, model, optional=True) for spec in model.length_inputs]
    side = pb.TruncationSide.Value(f"TRUNCATION_SIDE_{manifest.truncation_side.upper()}")
    weights = model.weights_output
    heads = manifest.num_heads or (0 if weights is None else int([1, *weights.axes[1:-2]][-1]))
    is_raw = bool(model.raw_scores_output)
    return pb.Model(
        name=model.name,
        version=model.version,
        state=pb.Model.STATE_READY,
        description=manifest.description,
        inputs=inputs,
        outputs=[
            _tensor(spec, model, optional=name not in model.default_outputs)
            for name, spec in model.outputs.items()
        ],
        num_heads=heads or None,
        causal=manifest.causal,
        accepts_text=model.tokenizer is not None,
        parity=pb.Parity(
            relative_tolerance=manifest.tolerance.rtol,
            absolute_tolerance=manifest.tolerance.atol,
            measured_max_abs_error=model.measured_error,
            judge=manifest.judge,
        ),
        parameters=manifest.parameters,
        # The manifest has zeros if the operations are unknown.
        cost=copy_fields(manifest.cost, pb.Cost) if any(manifest.cost.model_dump().values()) else None,
        provider=model.provider,
        digest=model.digest,
        text_encoder=None
        if encoder is None
        else copy_fields(
            encoder,
            pb.TextEncoder,
            num_layers=encoder.layers,
            truncation_side=side,
            sparse_width=0 if encoder.sparse is None else encoder.sparse.width,
            similarity="" if encoder.late_interaction is None else encoder.late_interaction.similarity,
            has_token_vectors=TOKEN_VECTORS in model.heads,
        ),
        text_classifier=None
        if classifier is None
        else copy_fields(classifier, pb.TextClassifier, truncation_side=side, returns_raw_scores=is_raw),
        attention_patterns=[
            copy_fields(pattern, pb.AttentionPattern) for pattern in manifest.attention_patterns
        ],
        attention_weights="" if weights is None else weights.name,
        aliases=aliases,
    )


def _tensor(spec: TensorSpec, model: LoadedModel, *, optional: bool) -> pb.Tensor:
    axes = [
        pb.Axis(size=axis)
        if isinstance(axis, int)
        else pb.Axis(
            name=axis, **{name: lengths.get(axis, 0) for name, lengths in model.length_limits.items()}
        )
        for axis in spec.axes
    ]
    data_type = ENUM_BY_NAME[NAME_BY_DTYPE[np.dtype(spec.data_type)]]
    bound = spec.exclusive_upper_bound
    bounds = bound if isinstance(bound, tuple) else () if bound is None else (bound,)
    return pb.Tensor(
        name=spec.name, data_type=data_type, axes=axes, optional=optional, exclusive_upper_bounds=bounds
    )


def describe_context(context: Context, model: LoadedModel) -> pb.Context:
    """A context of a model, as callers see it."""
    return copy_fields(
        context,
        pb.Context,
        model_name=model.name,
        model_version=model.version,
        bytes=context.nbytes,
        expires_at=int(context.expires_at),
    )

"""Describes models in attention.v1 messages."""

import numpy as np

from attention_serving.artifact.encoder import EncoderFacts
from attention_serving.artifact.manifest import POSITIONS, Cost, GraphKind, TensorSpec
from attention_serving.protos.attention.v1 import attention_pb2 as pb
from attention_serving.server.api.attention.codec import DATA_TYPES
from attention_serving.server.api.tensors import DATATYPES
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.models.repository import FailedModel, Model


def describe(model: Model) -> pb.Model:
    """Describes a model, loaded or failed."""
    if isinstance(model, FailedModel):
        return pb.Model(
            name=model.name, version=model.version, state=pb.Model.STATE_FAILED, state_reason=model.reason
        )
    manifest = model.manifest
    return pb.Model(
        name=model.name,
        version=model.version,
        state=pb.Model.STATE_READY,
        description=manifest.description,
        inputs=_inputs(model),
        outputs=_outputs(model),
        num_heads=manifest.num_heads or None,
        causal=manifest.causal,
        accepts_text=model.text_encoder is not None,
        parity=pb.Parity(
            relative_tolerance=manifest.tolerance.rtol,
            absolute_tolerance=manifest.tolerance.atol,
            measured_max_abs_error=model.measured_error,
        ),
        parameters=manifest.parameters,
        cost=_cost(manifest.cost),
        provider=model.provider,
        text_encoder=None if model.encoder is None else _encoder(model.encoder),
        attention_patterns=[
            pb.AttentionPattern(causal=pattern.causal, window=pattern.window)
            for pattern in manifest.attention_patterns
        ],
    )


def _encoder(encoder: EncoderFacts) -> pb.TextEncoder:
    return pb.TextEncoder(
        num_layers=encoder.layers,
        embedding_width=encoder.embedding_width,
        normalised=encoder.normalised,
        dimensions=encoder.dimensions,
        prompts=list(encoder.prompts),
        default_prompt=encoder.default_prompt,
        truncates=encoder.truncates,
    )


def _cost(cost: Cost) -> pb.Cost | None:
    """None if the operations are unknown: the manifest then has only zeros."""
    known = cost.model_dump()
    return pb.Cost(**known) if any(known.values()) else None


def _inputs(model: LoadedModel) -> list[pb.Tensor]:
    specs = [(spec, spec.name == POSITIONS) for spec in model.inputs]
    if GraphKind.MASK in model.manifest.graphs:
        specs.append((model.manifest.graphs[GraphKind.MASK].inputs[-1], True))
    return [_tensor(spec, model, optional=optional) for spec, optional in specs]


def _outputs(model: LoadedModel) -> list[pb.Tensor]:
    always = model.default_outputs
    return [_tensor(spec, model, optional=name not in always) for name, spec in model.outputs.items()]


def _tensor(spec: TensorSpec, model: LoadedModel, *, optional: bool) -> pb.Tensor:
    axes = [_axis(axis, model) for axis in spec.axes]
    data_type = DATA_TYPES[DATATYPES[np.dtype(spec.data_type)]]
    return pb.Tensor(name=spec.name, data_type=data_type, axes=axes, optional=optional)


def _axis(axis: str | int, model: LoadedModel) -> pb.Axis:
    if isinstance(axis, int):
        return pb.Axis(size=axis)
    return pb.Axis(name=axis, max_length=model.manifest.max_lengths.get(axis, 0))

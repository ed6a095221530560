"""The methods of attention.v1, and how models are described in it."""

from functools import partial
from typing import Any, ClassVar

import numpy as np

from attention_serving.artifact.encoder import ClassifierFacts, EncoderFacts
from attention_serving.artifact.manifest import Cost, GraphKind, TensorSpec
from attention_serving.protos.attention.v1 import attention_pb2 as pb
from attention_serving.server.api.attention import codec, contexts, named_tensors
from attention_serving.server.api.attention.codec import DATA_TYPES
from attention_serving.server.api.codec_threads import CodecThreads
from attention_serving.server.api.errors import code_of, engine_error_of
from attention_serving.server.api.inference import Inference
from attention_serving.server.api.method import Method, find_model, of_service, readable
from attention_serving.server.api.protobuf_bytes import Parsed, field, leading_text, text_field
from attention_serving.server.api.tensors import DATATYPES, Allowance, Reply
from attention_serving.server.engine.engine import Engine
from attention_serving.server.engine.errors import InvalidRequestError, LimitExceededError
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.models.repository import FailedModel, Model
from attention_serving.server.engine.requests.validation import encode_texts
from attention_serving.server.engine.types import Request, Result
from attention_serving.server.security.rights import Right
from attention_serving.server.transport.call import Call

SERVICE = pb.DESCRIPTOR.services_by_name["AttentionService"]
# A response contains the id of its request.
MAX_ID_BYTES = 1024
ID, RESPONSE = pb.AttendStreamResponse.ID_FIELD_NUMBER, (pb.AttendStreamResponse.RESPONSE_FIELD_NUMBER,)


class Attend(Inference):
    """Computes the context vectors of one request."""

    kind: ClassVar[Any] = pb.AttendRequest
    paths = codec.PATHS
    is_slow = staticmethod(codec.is_slow)

    def _decode(
        self, parsed: Parsed[Any], model: LoadedModel, deadline: float, allowance: Allowance
    ) -> tuple[Request, Reply]:
        message, wire = parsed.message, codec.output_type(parsed.message)
        if message.inputs:
            return named_tensors.decode(parsed, model, deadline, allowance, wire)
        embeds, has_texts = message.HasField("embedding"), message.HasField("text")
        if embeds and model.encoder is None:
            raise InvalidRequestError("embedding", f"model {model.name!r} is not a text encoder")
        request = codec.decode(parsed, codec.input_names(model), deadline, allowance)
        request = encode_texts(request, model, allowance.limits, allowance.reservation)
        known = codec.facts(request, model, has_texts=has_texts)
        has_heads = bool(model.manifest.num_heads)
        encode = partial(codec.encode, known=known, wire=wire, embeds=embeds, has_heads=has_heads)
        return request, Reply(encode)


class AttendStream(Attend):
    """Answers one request of a stream."""

    kind, within, is_stream = pb.AttendStreamRequest, "request", True

    def _decode(
        self, parsed: Parsed[Any], model: LoadedModel, deadline: float, allowance: Allowance
    ) -> tuple[Request, Reply]:
        if (size := len(parsed.id.encode())) > MAX_ID_BYTES:
            raise LimitExceededError("id", f"has {size} bytes; the limit is {MAX_ID_BYTES}")
        return super()._decode(parsed, model, deadline, allowance)

    def _encode(self, reply: Reply, result: Result, request_id: str) -> bytes:
        return b"".join([text_field(ID, request_id), *field(RESPONSE, reply.parts(result))])

    def _leading_id(self, message: bytes) -> str:
        return leading_text(message, pb.AttendStreamRequest.ID_FIELD_NUMBER)

    def _failed(self, request_id: str, error: Exception) -> bytes:
        shown = engine_error_of(error)
        stream_error = pb.StreamError(
            code=code_of(shown).value[0], reason=shown.reason, message=shown.message, field=shown.field
        )
        return pb.AttendStreamResponse(id=request_id[:MAX_ID_BYTES], error=stream_error).SerializeToString()


def methods(engine: Engine, threads: CodecThreads) -> dict[str, Method]:
    """Each method by its full name.

    Args:
        engine: Computes results.
        threads: Decode and encode what is large.
    """
    repository = engine.repository

    def list_models(_request: pb.ListModelsRequest, call: Call) -> pb.ListModelsResponse:
        """Describes the models that the caller may read, those that failed to load included."""
        return pb.ListModelsResponse(models=map(describe, readable(repository, call)))

    def get_model(request: pb.GetModelRequest, call: Call) -> pb.GetModelResponse:
        model = find_model(repository.find, call, Right.READ, request.name, request.version)
        return pb.GetModelResponse(model=describe(model))

    return {
        f"/{SERVICE.full_name}/Attend": Attend(engine, threads).method(),
        f"/{SERVICE.full_name}/AttendStream": AttendStream(engine, threads).method(),
        **contexts.methods(SERVICE, engine, threads),
        **of_service(SERVICE, Right.READ, ListModels=list_models, GetModel=get_model),
    }


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
        digest=model.digest,
        text_encoder=None if model.encoder is None else _encoder(model.encoder),
        text_classifier=None if model.classifier is None else _classifier(model.classifier),
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


def _classifier(classifier: ClassifierFacts) -> pb.TextClassifier:
    return pb.TextClassifier(
        family=classifier.family,
        labels=classifier.labels,
        activation=classifier.activation,
        truncates=classifier.truncates,
    )


def _cost(cost: Cost) -> pb.Cost | None:
    """None if the operations are unknown: the manifest then has only zeros."""
    known = cost.model_dump()
    return pb.Cost(**known) if any(known.values()) else None


def _inputs(model: LoadedModel) -> list[pb.Tensor]:
    specs = [(spec, spec.name in model.optional_inputs) for spec in model.inputs]
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

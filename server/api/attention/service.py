"""The methods of attention.v1, and how models are described in it."""

from functools import partial
from typing import Any, ClassVar, TypeVar

import numpy as np
from google.protobuf.message import Message

from attention_serving.artifact.manifest import GraphKind, TensorSpec
from attention_serving.protos.attention.v1 import attention_pb2 as pb
from attention_serving.server.api.attention import codec, contexts, named_tensors
from attention_serving.server.api.attention.codec import DATA_TYPES
from attention_serving.server.api.codec_threads import CodecThreads
from attention_serving.server.api.errors import code_of
from attention_serving.server.api.inference import Inference
from attention_serving.server.api.method import Method, find_model, of_service, permitted
from attention_serving.server.api.protobuf_bytes import Parsed, field, leading_text, text_field
from attention_serving.server.api.tensors import DATATYPES, Allowance, Reply
from attention_serving.server.engine.engine import Engine
from attention_serving.server.engine.errors import (
    EngineError,
    InvalidRequestError,
    LimitExceededError,
    ModelNotFoundError,
)
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.models.repository import FailedModel, Model
from attention_serving.server.engine.requests.validation import encode_texts
from attention_serving.server.engine.types import DecodedRequest, Result
from attention_serving.server.security.rights import Right
from attention_serving.server.transport.call import Call

M = TypeVar("M", bound=Message)
SERVICE = pb.DESCRIPTOR.services_by_name["AttentionService"]
# A response contains the id of its request.
MAX_ID_BYTES = 1024
ID, RESPONSE = pb.AttendStreamResponse.ID_FIELD_NUMBER, (pb.AttendStreamResponse.RESPONSE_FIELD_NUMBER,)


class Attend(Inference):
    """Computes the context vectors of one request."""

    kind: ClassVar[Any] = pb.AttendRequest
    paths = codec.PATHS
    is_slow = staticmethod(codec.is_slow)

    def _model_name(self, parsed: Parsed[Any], call: Call) -> str:
        name = super()._model_name(parsed, call)
        if name or not parsed.message.text.return_labels:
            return name
        models = [
            model for model in self._engine.repository if isinstance(model, LoadedModel) and model.classifier
        ]
        names = {model.name for model in permitted(models, call, Right.INFER)}
        if len(names) != 1:
            raise InvalidRequestError("model_name", f"is required: {len(names)} text classifiers are ready")
        return names.pop()

    def _decode(
        self, parsed: Parsed[Any], model: LoadedModel, deadline: float, allowance: Allowance
    ) -> tuple[DecodedRequest, Reply]:
        message, wire = parsed.message, codec.output_type(parsed.message)
        if message.inputs:
            return named_tensors.decode(parsed, model, deadline, allowance, wire)
        embeds, has_texts = message.HasField("embedding"), message.HasField("text")
        if embeds and model.encoder is None:
            raise InvalidRequestError("embedding", f"model {model.name!r} is not a text encoder")
        request = codec.decode(parsed, codec.input_names(model), deadline, allowance)
        request = encode_texts(request, model, allowance.limits, allowance.reservation)
        prefix = codec.facts(request, model, has_texts=has_texts)
        if message.text.return_labels:
            if model.classifier is None:
                raise ModelNotFoundError(
                    f"model: {model.name!r} is not a text classifier", field="model_name"
                )
            prefix += pb.AttendResponse(labels=model.classifier.labels).SerializeToString()
        has_heads = bool(model.manifest.num_heads)
        encode = partial(codec.encode, prefix=prefix, wire=wire, embeds=embeds, has_heads=has_heads)
        return request, Reply(encode)


class AttendStream(Attend):
    """Answers one request of a stream."""

    kind, within, is_stream = pb.AttendStreamRequest, "request", True

    def _decode(
        self, parsed: Parsed[Any], model: LoadedModel, deadline: float, allowance: Allowance
    ) -> tuple[DecodedRequest, Reply]:
        if (size := len(parsed.id.encode())) > MAX_ID_BYTES:
            raise LimitExceededError("id", f"has {size} bytes; the limit is {MAX_ID_BYTES}")
        return super()._decode(parsed, model, deadline, allowance)

    def _encode(self, reply: Reply, result: Result, request_id: str) -> bytes:
        return b"".join([text_field(ID, request_id), *field(RESPONSE, reply.parts(result))])

    def _leading_id(self, message: bytes) -> str:
        return leading_text(message, pb.AttendStreamRequest.ID_FIELD_NUMBER)

    def _with_reply(self, error: EngineError, request_id: str) -> EngineError:
        stream_error = _copy(error, pb.StreamError, code=code_of(error).value[0])
        reply = pb.AttendStreamResponse(id=request_id[:MAX_ID_BYTES], error=stream_error)
        error.reply = reply.SerializeToString()
        return error


def methods(engine: Engine, threads: CodecThreads) -> dict[str, Method]:
    """Each method by its full name.

    Args:
        engine: Computes results.
        threads: Decode and encode what is large.
    """
    repository = engine.repository

    def list_models(_request: pb.ListModelsRequest, call: Call) -> pb.ListModelsResponse:
        """Describes the models that the caller may read, those that failed to load included."""
        return pb.ListModelsResponse(models=map(describe, permitted(repository, call)))

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
    manifest, encoder, classifier = model.manifest, model.encoder, model.classifier
    inputs = [_tensor(spec, model, optional=spec.name in model.optional_inputs) for spec in model.inputs]
    if GraphKind.MASK in manifest.graphs:
        inputs.append(_tensor(manifest.graphs[GraphKind.MASK].inputs[-1], model, optional=True))
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
        num_heads=manifest.num_heads or None,
        causal=manifest.causal,
        accepts_text=model.text_encoder is not None,
        parity=pb.Parity(
            relative_tolerance=manifest.tolerance.rtol,
            absolute_tolerance=manifest.tolerance.atol,
            measured_max_abs_error=model.measured_error,
        ),
        parameters=manifest.parameters,
        # The manifest has zeros if the operations are unknown.
        cost=_copy(manifest.cost, pb.Cost) if any(manifest.cost.model_dump().values()) else None,
        provider=model.provider,
        digest=model.digest,
        text_encoder=None if encoder is None else _copy(encoder, pb.TextEncoder, num_layers=encoder.layers),
        text_classifier=None if classifier is None else _copy(classifier, pb.TextClassifier),
        attention_patterns=[_copy(pattern, pb.AttentionPattern) for pattern in manifest.attention_patterns],
    )


def _copy(facts: object, kind: type[M], **fields: object) -> M:
    """A message with the attributes of an object in the fields of the same names, and some fields beside."""
    names = kind.DESCRIPTOR.fields_by_name.keys() - fields.keys()
    return kind(**fields, **{name: getattr(facts, name) for name in names})


def _tensor(spec: TensorSpec, model: LoadedModel, *, optional: bool) -> pb.Tensor:
    axes = [_axis(axis, model) for axis in spec.axes]
    data_type = DATA_TYPES[DATATYPES[np.dtype(spec.data_type)]]
    return pb.Tensor(name=spec.name, data_type=data_type, axes=axes, optional=optional)


def _axis(axis: str | int, model: LoadedModel) -> pb.Axis:
    if isinstance(axis, int):
        return pb.Axis(size=axis)
    return pb.Axis(name=axis, max_length=model.manifest.max_lengths.get(axis, 0))

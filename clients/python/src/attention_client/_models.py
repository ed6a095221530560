"""Descriptions of models, as plain values."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Self, TypeVar

from google.protobuf.message import Message

from attention_client._generated.attention.v1 import attention_pb2 as pb

_DATA_TYPES = {
    pb.DATA_TYPE_FP32: "float32",
    pb.DATA_TYPE_FP16: "float16",
    pb.DATA_TYPE_BF16: "bfloat16",
    pb.DATA_TYPE_INT64: "int64",
    pb.DATA_TYPE_BOOL: "bool",
    pb.DATA_TYPE_STRING: "str",
}
_STATES = {pb.Model.STATE_READY: "ready", pb.Model.STATE_FAILED: "failed"}
UNKNOWN = "unknown"
_InfoT = TypeVar("_InfoT")


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A named input or output of a model.

    Attributes:
        name: Name, as in the ONNX graph.
        data_type: Element type by its NumPy name, or "bfloat16" or "str".
        axes: Outermost first: the size of a fixed axis, or the name of an axis whose size varies.
        optional: For an input, whether a request may omit it; for an output, whether it is returned on
            request only.
        max_lengths: Largest sizes that the model accepts, by the name of the axis; axes without one are not
            limited by the model.
        min_lengths: Smallest sizes, likewise; axes without one may have the size 1.
        length_multiples: What sizes must be a multiple of, likewise; axes without one may have any size.
        exclusive_upper_bounds: For an input of ids: ids are from 0 to below this number, or to below one
            number for each column; empty if any integer is accepted.
    """

    name: str
    data_type: str
    axes: tuple[str | int, ...]
    optional: bool
    max_lengths: Mapping[str, int] = field(default_factory=dict, hash=False)
    min_lengths: Mapping[str, int] = field(default_factory=dict, hash=False)
    length_multiples: Mapping[str, int] = field(default_factory=dict, hash=False)
    exclusive_upper_bounds: tuple[int, ...] = ()

    @classmethod
    def from_proto(cls, tensor: pb.Tensor) -> Self:
        """Reads the protobuf message."""
        axes = tuple(axis.name or axis.size for axis in tensor.axes)
        data_type = _DATA_TYPES.get(tensor.data_type, UNKNOWN)
        limits: dict[str, Any] = {
            f"{name}s": {axis.name: getattr(axis, name) for axis in tensor.axes if getattr(axis, name)}
            for name in ("max_length", "min_length", "length_multiple")
        }
        limits["exclusive_upper_bounds"] = tuple(tensor.exclusive_upper_bounds)
        return cls(tensor.name, data_type, axes, tensor.optional, **limits)


@dataclass(frozen=True, slots=True)
class ParityInfo:
    """The tolerance to the judge's results: |served - judge's| <= absolute + relative * |judge's|.

    Attributes:
        relative_tolerance: The relative tolerance.
        absolute_tolerance: The absolute tolerance.
        measured_max_abs_error: Largest |served - judge's| that the server measured on its own hardware.
        judge: What computed the golden vectors, such as eager PyTorch; empty if the server does not say it.
    """

    relative_tolerance: float
    absolute_tolerance: float
    measured_max_abs_error: float
    judge: str = ""


@dataclass(frozen=True, slots=True)
class CostInfo:
    """The cost of a model in floating-point operations; a multiply-add counts as two.

    Attributes:
        flops_per_query: For each query row, in the linear layers.
        flops_per_key: For each key row, in the linear layers.
        flops_per_pair: For each pair of a query row and a key row.
    """

    flops_per_query: int
    flops_per_key: int
    flops_per_pair: int


@dataclass(frozen=True, slots=True)
class EncoderInfo:
    """What sets a text encoder apart.

    Attributes:
        num_layers: Number of layers, L.
        embedding_width: Number of elements of an embedding.
        normalised: Whether embeddings have length 1.
        dimensions: The numbers of elements that embeddings can be shortened to.
        prompts: Names of the prompts.
        default_prompt: Name of the prompt of requests that name none; empty for none.
        truncates: Whether long texts are cut unless a request says otherwise.
        truncation_side: Which end of a text that is cut loses tokens: "right" or "left".
        quantisation_ranges: By number of elements, the absolute value that 127 stands for in int8; 1 without.
    """

    num_layers: int
    embedding_width: int
    normalised: bool
    dimensions: tuple[int, ...]
    prompts: tuple[str, ...]
    default_prompt: str
    truncates: bool
    truncation_side: str = "right"
    quantisation_ranges: Mapping[int, float] = field(default_factory=dict, hash=False)


@dataclass(frozen=True, slots=True)
class ClassifierInfo:
    """What sets a text classifier or reranker apart.

    Attributes:
        family: The family of the model, such as "bert".
        labels: The name of each score.
        activation: What was applied to the logits: "sigmoid", "softmax" or "identity".
        truncates: Whether long texts are cut unless a request says otherwise.
        truncation_side: As `EncoderInfo.truncation_side`.
        returns_raw_scores: Whether requests may ask for scores before the activation.
        prompts: Names of the prompts.
        default_prompt: As `EncoderInfo.default_prompt`.
    """

    family: str
    labels: tuple[str, ...]
    activation: str
    truncates: bool
    truncation_side: str = "right"
    returns_raw_scores: bool = False
    prompts: tuple[str, ...] = ()
    default_prompt: str = ""


@dataclass(frozen=True, slots=True)
class PatternInfo:
    """Which keys a query row may attend to, by the rule of the model itself.

    Attributes:
        causal: Whether a query row attends only to keys up to its own position.
        window: A query row attends only to keys fewer than this many rows away; 0 if the distance does not
            matter.
    """

    causal: bool
    window: int


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """One version of one model.

    Attributes:
        name: Name of the model.
        version: Version of the model.
        state: "ready" or "failed"; "unknown" if the client is older than the server.
        state_reason: Why the model is not ready; empty if it is.
        description: One line that describes the model.
        inputs: The inputs.
        outputs: The outputs.
        num_heads: Number of attention heads, H; None for a module without attention weights.
        causal: Whether a query row cannot attend to keys after its own position.
        accepts_text: Whether the model has a tokenizer and takes text.
        parity: Tolerance and measured error; None if the server does not state them.
        parameters: Number of trainable parameters.
        cost: Floating-point operations; None if the server does not state them.
        provider: ONNX Runtime's execution provider, such as "CPUExecutionProvider".
        text_encoder: For a text encoder; None for any other model.
        attention_patterns: The rule of each layer of a text encoder, or that of a single attention module;
            empty for other modules.
        text_classifier: For a text classifier or reranker; None for any other model.
        digest: Identifies what the server has loaded: SHA-256 of the artifact's manifest, in hexadecimal
            digits. Models with equal digests are the same; empty if the model is not ready.
        attention_weights: Name of the output with attention weights, which `return_weights` returns; empty if
            there is none.
        aliases: Further names under which requests reach the model.
    """

    name: str
    version: str
    state: str
    state_reason: str
    description: str
    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]
    num_heads: int | None
    causal: bool
    accepts_text: bool
    parity: ParityInfo | None
    parameters: int
    cost: CostInfo | None
    provider: str
    text_encoder: EncoderInfo | None = None
    attention_patterns: tuple[PatternInfo, ...] = ()
    text_classifier: ClassifierInfo | None = None
    digest: str = ""
    attention_weights: str = ""
    aliases: tuple[str, ...] = ()

    @classmethod
    def from_proto(cls, model: pb.Model) -> Self:
        """Reads the protobuf message."""
        return _read(
            cls,
            model,
            state=_STATES.get(model.state, UNKNOWN),
            inputs=tuple(TensorInfo.from_proto(tensor) for tensor in model.inputs),
            outputs=tuple(TensorInfo.from_proto(tensor) for tensor in model.outputs),
            num_heads=model.num_heads or None,  # 0 or absent for a module without attention heads
            parity=_read(ParityInfo, model.parity) if model.HasField("parity") else None,
            # A cost that is absent or all zeros is unknown.
            cost=_read(CostInfo, model.cost) if model.cost.ListFields() else None,
            text_encoder=_read(EncoderInfo, model.text_encoder) if model.HasField("text_encoder") else None,
            attention_patterns=tuple(_read(PatternInfo, pattern) for pattern in model.attention_patterns),
            text_classifier=(
                _read(ClassifierInfo, model.text_classifier) if model.HasField("text_classifier") else None
            ),
        )


def _read(cls: type[_InfoT], message: Message, **values: Any) -> _InfoT:
    """An object with `values`, and with the message's fields of the same names for the rest."""
    for name in {attribute.name for attribute in fields(cls)} - values.keys():  # type: ignore[arg-type]
        value = getattr(message, name)
        if name == "truncation_side":
            value = "left" if value == pb.TRUNCATION_SIDE_LEFT else "right"
        is_plain = isinstance(value, str | int | float)
        values[name] = value if is_plain else dict(value) if hasattr(value, "items") else tuple(value)
    return cls(**values)

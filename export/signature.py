"""What each graph of a module takes and gives, by name, type and axes."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from export.manifest import ATTENTION_MASK, BATCH_AXIS, KEY_LENGTHS, Arrays, GraphKind, TensorSpec
from model.attention import MultiHeadAttention
from model.text import TextAttention

QUERY_AXIS = "query_length"
KEY_AXIS = "key_length"
MASK_HEADS_AXIS = "mask_heads"
AttentionModule = MultiHeadAttention | TextAttention


@dataclass(frozen=True)
class Signature:
    """Inputs and outputs of one graph."""

    kind: GraphKind
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


def signatures(module: AttentionModule) -> list[Signature]:
    """The graphs that an attention module is exported to."""
    return [_signature(module, kind) for kind in GraphKind]


def _signature(module: AttentionModule, kind: GraphKind) -> Signature:
    config = module.config
    key_axis = KEY_AXIS if config.cross else QUERY_AXIS
    inputs = _own_inputs(module)
    outputs = [_tensor("context_vectors", "float32", BATCH_AXIS, QUERY_AXIS, config.d_out)]
    if kind is GraphKind.LENGTHS:
        inputs.append(_tensor(KEY_LENGTHS, "int64", BATCH_AXIS))
    if kind in (GraphKind.MASK, GraphKind.WEIGHTS):
        inputs.append(_tensor(ATTENTION_MASK, "bool", BATCH_AXIS, MASK_HEADS_AXIS, QUERY_AXIS, key_axis))
    if kind is GraphKind.WEIGHTS:
        axes = (BATCH_AXIS, config.num_heads, QUERY_AXIS, key_axis)
        outputs.append(_tensor("attention_weights", "float32", *axes))
    return Signature(kind, tuple(inputs), tuple(outputs))


def _own_inputs(module: AttentionModule) -> list[TensorSpec]:
    config = module.config
    if isinstance(module, TextAttention):
        return [_tensor("token_ids", "int64", BATCH_AXIS, QUERY_AXIS)]
    inputs = [_tensor("query", "float32", BATCH_AXIS, QUERY_AXIS, config.d_query)]
    if config.cross:
        inputs.append(_tensor("key", "float32", BATCH_AXIS, KEY_AXIS, config.d_key))
    if config.separate_value:
        inputs.append(_tensor("value", "float32", BATCH_AXIS, KEY_AXIS, config.d_value))
    return inputs


def _tensor(name: str, data_type: str, *axes: str | int) -> TensorSpec:
    return TensorSpec.model_validate({"name": name, "data_type": data_type, "axes": axes})


class SignedModule(nn.Module):
    """A module called with the tensors of one signature by position, giving its outputs as a tuple."""

    def __init__(self, module: AttentionModule, signature: Signature) -> None:
        super().__init__()
        self.module = module
        self.names = [spec.name for spec in signature.inputs]
        self.return_weights = signature.kind is GraphKind.WEIGHTS

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Calls the module."""
        named = dict(zip(self.names, tensors, strict=True))
        outputs = self.module(**named, return_weights=self.return_weights)
        return tuple(output for output in outputs if output is not None)


def run_eager(module: AttentionModule, signature: Signature, inputs: Arrays) -> Arrays:
    """Runs the module in eager PyTorch: arrays by name in, arrays by name out."""
    tensors = [torch.from_numpy(inputs[spec.name]) for spec in signature.inputs]
    with torch.inference_mode():
        outputs = SignedModule(module, signature)(*tensors)
    return {spec.name: output.numpy() for spec, output in zip(signature.outputs, outputs, strict=True)}


def random_inputs(
    module: AttentionModule, signature: Signature, sizes: Mapping[str, int], rng: np.random.Generator
) -> Arrays:
    """Inputs of a graph for the given sizes of its symbolic axes.

    Vectors are standard normal, masks and lengths random. In a batch the first sequence has no key at
    all; a sequence that is alone may attend to nothing with its first row, where it has another.
    """
    arrays: Arrays = {}
    for spec in signature.inputs:
        shape = [sizes[axis] if isinstance(axis, str) else axis for axis in spec.axes]
        if spec.name == KEY_LENGTHS:
            key_axis = KEY_AXIS if module.config.cross else QUERY_AXIS
            arrays[spec.name] = rng.integers(1, sizes[key_axis], shape, endpoint=True)
            if sizes[BATCH_AXIS] > 1:
                arrays[spec.name][0] = 0
        elif spec.name == ATTENTION_MASK:
            arrays[spec.name] = rng.random(shape) < 0.7  # noqa: PLR2004 - most pairs may attend
            if sizes[BATCH_AXIS] > 1:
                arrays[spec.name][0] = False
            elif sizes[QUERY_AXIS] > 1:
                arrays[spec.name][:, :, 0] = False
        elif isinstance(module, TextAttention):
            arrays[spec.name] = rng.integers(0, module.embedding.num_embeddings, shape)
        else:
            arrays[spec.name] = rng.standard_normal(shape, dtype=np.float32)
    return arrays

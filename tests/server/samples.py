"""Small models, requests to them, and the results of eager PyTorch."""

import math
from collections.abc import Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from attention_serving.artifact.manifest import GraphKind
from attention_serving.artifact.names import ModelId
from attention_serving.export.artifact import write_artifact
from attention_serving.export.signature import AttentionModule
from attention_serving.model.attention import MultiHeadAttention
from attention_serving.model.config import AttentionConfig
from attention_serving.model.presets import build_preset
from attention_serving.server.engine.limits import Limits
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.models.loading import ModelStore
from attention_serving.server.engine.models.repository import Repository
from attention_serving.server.engine.requests.request import Request, SequenceInputs
from attention_serving.server.engine.requests.validation import validate
from attention_serving.server.engine.run.provider import Device
from attention_serving.server.engine.types import Array, DecodedRequest, Mask, MaskKind, Ragged, Result
from tests.support import eager
from tests.support.artifacts import ModelSet

ROOT = Path(__file__).resolve().parents[2]
SELF, CROSS, TEXT = "tiny-self", "tiny-cross", "sentence-self-attention"
CONFIGS = {
    SELF: AttentionConfig(d_query=4, num_heads=2, causal=True),
    CROSS: AttentionConfig(d_query=4, d_key=6, d_value=5, num_heads=2, cross=True, separate_value=True),
}
WIDTHS = {"query": 4, "key": 6, "value": 5}
HEADS = 2
WORDS = ("Life", "is", "short", "eat", "dessert", "first")
# (Tq, Tk) of one sequence; self-attention reads the first.
Lengths = Sequence[tuple[int, int]]


class Sample(Request):
    """A validated request that keeps its sequences after it has ended, to compare them with the result.

    Attributes:
        asked: The sequences.
    """

    def __init__(self, request: Request) -> None:
        super().__init__(request.plan, request.model, request.sequences, request.deadline, request.caller)
        self.asked = request.sequences


@cache
def eager_module(name: str) -> AttentionModule:
    """The module behind an artifact of the fixtures."""
    if name == TEXT:
        return build_preset(TEXT)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return MultiHeadAttention(CONFIGS[name]).eval()


def load_repository(folder: Path, device: Device) -> Repository:
    """Loads every artifact of a folder."""
    store = ModelStore(folder, device)
    return Repository(store.load(*key) for key in store.artifacts())


def export_sample(name: str, folder: Path) -> None:
    """Writes the artifact of one of the models."""
    write_artifact(eager_module(name), ModelId(name), folder, description=f"the tests' {name}")


# A causal self-attention, a cross-attention and a text model.
MODELS = ModelSet(
    "samples", [partial(export_sample, name) for name in (SELF, CROSS, TEXT)], [Path(__file__)], ["artifacts"]
)


def ragged(rng: np.random.Generator, lengths: Sequence[int], *width: int) -> Ragged:
    """Standard normal sequences."""
    rows = rng.standard_normal((sum(lengths), *width), dtype=np.float32)
    return Ragged(rows, tuple(lengths))


def vectors(rng: np.random.Generator, model: LoadedModel, lengths: Lengths) -> dict[str, Ragged]:
    """Every input of a model that takes vectors."""
    first = model.inputs[0].name
    return {
        spec.name: ragged(rng, [pair[spec.name != first] for pair in lengths], WIDTHS[spec.name])
        for spec in model.inputs
    }


def mask_of(rng: np.random.Generator, model: LoadedModel, lengths: Lengths, kind: MaskKind) -> Mask:
    """A random mask; some query rows may attend to nothing."""
    cross = len(model.inputs) > 1
    pairs = [(query, key if cross else query) for query, key in lengths]
    count = {
        MaskKind.KEYS: sum(key for _, key in pairs),
        MaskKind.PAIRS: sum(query * key for query, key in pairs),
        MaskKind.HEADS: sum(HEADS * query * key for query, key in pairs),
    }[kind]
    return Mask(kind, rng.random(count) < 0.6)


def request_of(
    model: LoadedModel,
    lengths: Lengths,
    *,
    seed: int = 0,
    kind: MaskKind | None = None,
    return_weights: bool = False,
    deadline: float = math.inf,
) -> DecodedRequest:
    """A good request of random vectors."""
    rng = np.random.default_rng(seed)
    return DecodedRequest(
        inputs=vectors(rng, model, lengths),
        mask=None if kind is None else mask_of(rng, model, lengths, kind),
        return_weights=return_weights,
        deadline=deadline,
    )


def validated_of(model: LoadedModel, lengths: Lengths, **options: Any) -> Sample:
    """The same, validated."""
    return Sample(validate(request_of(model, lengths, **options), model, Limits()))


def assert_outputs(model: LoadedModel, sequence: SequenceInputs, outputs: Mapping[str, Array]) -> None:
    """The outputs of one sequence are those of eager PyTorch."""
    context, weights = eager.attend(eager_module(model.name), *sequence.inputs.values(), mask=sequence.mask)
    eager.assert_parity(outputs["context_vectors"], context)
    if "attention_weights" in outputs:
        eager.assert_parity(outputs["attention_weights"], weights)


def assert_answers(request: Sample, result: Result) -> None:
    """Each sequence's outputs, in order, are those of eager PyTorch; and no others were made."""
    names = ["context_vectors"]
    if request.plan.graph is GraphKind.WEIGHTS:
        names.append("attention_weights")
    assert list(result.outputs) == names
    assert all(len(arrays) == len(request.asked) for arrays in result.outputs.values())
    for index, sequence in enumerate(request.asked):
        assert_outputs(request.model, sequence, {name: result.outputs[name][index] for name in names})

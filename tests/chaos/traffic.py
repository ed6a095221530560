"""The good requests of a soak, each with the answer of eager PyTorch that its response is compared with."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from attention_client import AttendInputs, AttentionClient, AttentionResult, TextInputs

from attention_serving.model.presets import build_preset
from tests.chaos.requests import random_rows
from tests.server.samples import CROSS, SELF, TEXT, WORDS, eager_module
from tests.support import open_inference
from tests.support.eager import ATOL, RTOL, Array, attend

WIDE, ROTARY, WIDE_CROSS = "multi-head-768x12", "rotary-768x12", "cross-768x12"
WIDTHS = {SELF: (4,), CROSS: (4, 6, 5), WIDE: (768,), ROTARY: (768,), WIDE_CROSS: (768, 768, 768)}
Answers = list[Array]


@dataclass(frozen=True, eq=False)
class Exchange:
    """A request and its answer.

    Attributes:
        name: What is special about it.
        send: Sends it with a client of a target, and returns the arrays of the response.
        answers: The arrays that eager PyTorch computes.
        inputs: The same request as an item of a stream; None if it differs from the others in its options.
        rows: Rows of its longest sequence.
    """

    name: str
    send: Callable[[AttentionClient, str], Answers]
    answers: Answers
    inputs: AttendInputs | TextInputs | None = None
    model: str = ""
    rows: int = 0

    def is_answered_by(self, arrays: Answers) -> bool:
        """Whether a response is the answer."""
        return len(arrays) == len(self.answers) and all(
            one.shape == other.shape and np.allclose(one, other, rtol=RTOL, atol=ATOL)
            for one, other in zip(arrays, self.answers, strict=True)
        )


def pool(long_rows: int) -> list[Exchange]:
    """Requests of every kind: models, masks, weights, text, several sequences, long ones, both protocols."""
    exchanges = [vectors(name, [length]) for name in WIDTHS for length in (1, 6, 37, 128)]
    exchanges += [vectors(name, [3, 50, 1, 17, 128]) for name in WIDTHS]
    exchanges += [weighted(name, length) for name in (SELF, CROSS, WIDE) for length in (5, 60)]
    exchanges += [masked(name, length) for name in (SELF, WIDE, ROTARY) for length in (9, 90)]
    exchanges += [text(words) for words in (1, 3, 6)]
    exchanges += [infer(name, length) for name in (SELF, CROSS, WIDE) for length in (4, 77)]
    exchanges += [vectors(name, [long_rows]) for name in (WIDE, ROTARY)]
    return exchanges


@cache
def _module(name: str) -> object:
    return eager_module(name) if name in (SELF, CROSS, TEXT) else build_preset(name)


def _inputs(name: str, length: int, seed: int) -> list[Array]:
    """One sequence for each input; keys differ in length from the query."""
    widths = WIDTHS[name]
    rows = [length if at == 0 else length % 29 + 2 for at in range(len(widths))]
    return [random_rows(count, width, seed + at) for at, (count, width) in enumerate(zip(rows, widths))]  # noqa: B905


def _eager(name: str, *inputs: Array, mask: Array | None = None) -> tuple[Array, Array]:
    return attend(_module(name), *inputs, mask=mask)  # type: ignore[arg-type]  # of the two kinds of module


def vectors(name: str, lengths: list[int]) -> Exchange:
    """One sequence or several, on attention.v1."""
    sequences = [_inputs(name, length, 7 * at + length) for at, length in enumerate(lengths)]
    columns = [list(column) for column in zip(*sequences, strict=True)]
    answers = [_eager(name, *inputs)[0] for inputs in sequences]
    return Exchange(
        f"{name}, {len(lengths)} sequences",
        lambda client, _: list(client.attend(name, *columns).context_vectors),
        answers,
        AttendInputs(*columns) if len(lengths) == 1 else None,
        name,
        max(lengths),
    )


def weighted(name: str, length: int) -> Exchange:
    """With attention weights."""
    inputs = _inputs(name, length, 3)
    return Exchange(
        f"{name}, weights",
        lambda client, _: _arrays(client.attend(name, *inputs, return_weights=True)),
        list(_eager(name, *inputs)),
    )


def _arrays(result: AttentionResult[Any]) -> Answers:
    assert result.attention_weights is not None
    return [result.context_vectors, result.attention_weights]


def masked(name: str, length: int) -> Exchange:
    """With a mask of pairs."""
    (query,) = _inputs(name, length, 5)
    mask = np.random.default_rng(length).random((length, length)) < 0.7
    mask[:, 0] = True
    return Exchange(
        f"{name}, mask",
        lambda client, _: [client.attend(name, query, mask=mask).context_vectors],
        [_eager(name, query, mask=mask)[0]],
    )


def text(words: int) -> Exchange:
    """A text of some words of the model's sentence."""
    sentence = " ".join(WORDS[:words])
    tokens = [sorted(WORDS).index(word) for word in WORDS[:words]]
    return Exchange(
        "text",
        lambda client, _: [client.attend_text(TEXT, sentence).context_vectors],
        [_eager(TEXT, np.array(tokens, np.int64))[0]],
    )


def infer(name: str, length: int) -> Exchange:
    """Over the Open Inference Protocol, with weights."""
    inputs = _inputs(name, length, 11)
    tensors = {key: array[None] for key, array in zip(("query", "key", "value"), inputs, strict=False)}
    return Exchange(
        f"{name}, Open Inference Protocol",
        lambda _, target: _infer(target, name, tensors),
        list(_eager(name, *inputs)),
    )


def _infer(target: str, name: str, tensors: Mapping[str, Array]) -> Answers:
    outputs = open_inference.infer(target, name, tensors, ["context_vectors", "attention_weights"])
    return [outputs["context_vectors"][0], outputs["attention_weights"][0]]

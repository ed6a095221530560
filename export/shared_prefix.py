"""The graphs of causal rerankers that compute the prefix of several pairs once, and cases that prove them."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from attention_serving.artifact.encoder import PREFIX, SCORES, ClassifierFacts
from attention_serving.artifact.golden import Arrays, GoldenCase, texts_of, token_inputs
from attention_serving.artifact.manifest import BATCH_AXIS, KEY_LENGTHS, GraphKind
from attention_serving.export.precision import ENCODER_TOLERANCES, Precision
from attention_serving.export.probe import LongCase
from attention_serving.export.signature import KEY_AXIS, QUERY_AXIS, Signature, tensor
from attention_serving.model.text_reranker import CausalReranker

AXES = (QUERY_AXIS, KEY_AXIS)
# How many pairs of the reference are split, and the largest number of tokens of those.
SPLIT_PAIRS, MOST_TOKENS = 4, 160


def split_cases(
    reranker: CausalReranker, facts: ClassifierFacts, texts: Sequence[GoldenCase]
) -> list[LongCase]:
    """Pairs that the library scored whole, as a prefix that eager PyTorch computes and what follows it.

    Args:
        reranker: The reranker.
        facts: Its prompts and templates.
        texts: The pairs and their scores.

    Returns:
        Sizes and cases of the graph `suffix`; empty if a prefix cannot be computed by itself, or gives other
        scores in eager PyTorch, or if there is no reference.
    """
    encode = token_inputs(reranker.tokenizer, ["ids"], reranker.max_tokens, facts)
    cases, tolerance = list[LongCase](), ENCODER_TOLERANCES[Precision.FP32]
    for text in texts:
        ids = encode(*texts_of(text))["ids"]
        at = ids.shape[1] * (1 + len(cases)) // (2 + SPLIT_PAIRS)
        if not at or ids.shape[1] > MOST_TOKENS:
            continue
        try:
            inputs, scores = _split(reranker, ids, at)
        except Exception:  # models have many forms, which may refuse it
            return []
        if not tolerance.holds(scores, text.outputs[SCORES]):
            return []
        sizes = {BATCH_AXIS: 1, QUERY_AXIS: ids.shape[1] - at, KEY_AXIS: at}
        cases.append((sizes, GoldenCase(GraphKind.SUFFIX, inputs, text.outputs)))
        if len(cases) == SPLIT_PAIRS:
            break
    return cases


@torch.inference_mode()
def _split(reranker: CausalReranker, ids: NDArray[Any], at: int) -> tuple[Arrays, NDArray[Any]]:
    """The inputs of the graph `suffix` for ids (1, T) from an index on; and the scores in eager PyTorch."""
    prefix = reranker.compute_prefix(torch.from_numpy(ids[:, :at]))
    inputs = {"token_ids": ids[:, at:], KEY_LENGTHS: np.array([ids.shape[1] - at])}
    inputs |= {name: array.numpy() for name, array in zip(PREFIX, prefix, strict=True)}
    scores = reranker.score_suffixes(*map(torch.from_numpy, inputs.values()))
    return inputs, (scores[0] if isinstance(scores, tuple) else scores).numpy()


def prefix_signatures(lengths: Signature, cases: Sequence[LongCase]) -> Iterator[Signature]:
    """The graphs `prefix` and `suffix`; none without cases.

    Args:
        lengths: The graph with lengths, whose inputs and outputs `suffix` has.
        cases: The result of `split_cases`.
    """
    for _, case in cases[:1]:
        shapes = {name: case.inputs[name].shape for name in PREFIX}  # (1, L, Hkv, P, d)
        outputs, inputs = (
            tuple(tensor(name, "float32", batch, *form[1:3], axis, form[4]) for name, form in shapes.items())
            for batch, axis in ((BATCH_AXIS, QUERY_AXIS), (1, KEY_AXIS))
        )
        token_ids = lengths.inputs[:1]
        prefix = replace(lengths, kind=GraphKind.PREFIX, inputs=token_ids, outputs=outputs)
        yield replace(prefix, method="compute_prefix")
        # A prefix and what follows it have the largest length together.
        halves = {axis: max(1, most // 2) for most in lengths.max_lengths.values() for axis in AXES}
        suffix = replace(lengths, kind=GraphKind.SUFFIX, inputs=(*lengths.inputs, *inputs))
        yield replace(suffix, method="score_suffixes", max_lengths=halves)

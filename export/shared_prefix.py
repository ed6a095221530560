"""The graphs of causal rerankers that compute the prefix of several pairs once, and cases that prove them."""

from collections.abc import Sequence

import numpy as np
import torch

from attention_serving.artifact.encoder import PREFIX, ClassifierFacts
from attention_serving.artifact.golden import GoldenCase, pair_inputs, texts_of
from attention_serving.artifact.manifest import BATCH_AXIS, KEY_LENGTHS, GraphKind
from attention_serving.export.probe import LongCase
from attention_serving.export.signature import KEY_AXIS, QUERY_AXIS, Signature, tensor
from attention_serving.model.text_reranker import CausalReranker

# How many pairs of the reference are split, and the largest number of tokens of each of their parts.
SPLIT_PAIRS, MOST_TOKENS = 4, 64


def prefix_signatures(reranker: CausalReranker, lengths: Signature) -> list[Signature]:
    """The graphs `prefix` and `suffix`.

    Args:
        reranker: The reranker.
        lengths: The graph with lengths, whose inputs and outputs `suffix` has.
    """
    token_ids = lengths.inputs[0]
    with torch.inference_mode():
        keys, values = reranker.compute_prefix(torch.zeros(1, 1, dtype=torch.int64))
    shapes = [tuple(tensors.shape) for tensors in (keys, values)]  # (1, L, Hkv, 1, d)
    outputs, inputs = (
        tuple(
            tensor(name, "float32", batch, *shape[1:3], axis, shape[4])
            for name, shape in zip(PREFIX, shapes, strict=True)
        )
        for batch, axis in ((BATCH_AXIS, QUERY_AXIS), (1, KEY_AXIS))
    )
    # A prefix and what follows it have the largest length together.
    halves = {
        axis: max(1, most // 2) for most in lengths.max_lengths.values() for axis in (QUERY_AXIS, KEY_AXIS)
    }
    return [
        Signature(
            kind=GraphKind.PREFIX,
            inputs=(token_ids,),
            outputs=outputs,
            method="compute_prefix",
            max_lengths=lengths.max_lengths,
        ),
        Signature(
            kind=GraphKind.SUFFIX,
            inputs=(token_ids, tensor(KEY_LENGTHS, "int64", BATCH_AXIS), *inputs),
            outputs=lengths.outputs,
            method="score_suffixes",
            least_key_length=1,
            max_lengths=halves,
        ),
    ]


def split_cases(
    reranker: CausalReranker, facts: ClassifierFacts, texts: Sequence[GoldenCase]
) -> list[LongCase]:
    """Pairs that the library scored whole, as a prefix that eager PyTorch computes and what follows it.

    Args:
        reranker: The reranker.
        facts: Its prompts and templates.
        texts: The pairs and their scores.

    Returns:
        Sizes and cases of the graph `suffix`.
    """
    encode = pair_inputs(reranker.tokenizer, ["ids"], reranker.max_tokens, facts, facts.default_prompt)
    cases = list[LongCase]()
    for text in texts:
        ids = encode(*texts_of(text))["ids"]
        at = ids.shape[1] * (1 + len(cases)) // (2 + SPLIT_PAIRS)
        if not 0 < at <= MOST_TOKENS or ids.shape[1] > 2 * MOST_TOKENS:
            continue
        with torch.inference_mode():
            prefix = reranker.compute_prefix(torch.from_numpy(ids[:, :at]))
        inputs = {
            "token_ids": ids[:, at:],
            KEY_LENGTHS: np.array([ids.shape[1] - at]),
            **{name: array.numpy() for name, array in zip(PREFIX, prefix, strict=True)},
        }
        sizes = {BATCH_AXIS: 1, QUERY_AXIS: ids.shape[1] - at, KEY_AXIS: at}
        cases.append((sizes, GoldenCase(GraphKind.SUFFIX, inputs, text.outputs)))
        if len(cases) == SPLIT_PAIRS:
            break
    return cases

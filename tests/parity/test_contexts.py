"""Queries to stored contexts, however these were put together, equal eager PyTorch over all rows at once."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from attention_client import AttentionClient, Context, NotFoundError
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_serving.model.attention import MultiHeadAttention
from tests.support.eager import Array, assert_parity, attend
from tests.support.systems import SYSTEMS, build

NAMES = {key: name for key, name in SYSTEMS.items() if isinstance(build(name), MultiHeadAttention)}


class Memory:
    """The rows of one context, in parts, and what a user keeps to ask about them."""

    def __init__(self, name: str, parts: list[int], rng: np.random.Generator, *, masked: bool) -> None:
        self.name, self.module = name, build(name)
        config, total = self.module.config, sum(parts)
        self.rows = [rng.standard_normal((total, config.d_key), np.float32)]
        if config.separate_value:
            self.rows.append(rng.standard_normal((total, config.d_value), np.float32))
        self.visible = rng.random(total) < 0.7 if masked else np.ones(total, np.bool_)
        self.ends = np.cumsum(parts).tolist()
        self.visible[[0, *self.ends[:-1]]] = True  # a part needs a row that may be attended to

    def put(self, client: AttentionClient, part: int, *, at_once: bool) -> Context:
        """The context with the rows of all parts up to this one."""
        ends = [self.ends[part]] if at_once else self.ends[: part + 1]
        first, *appended = [slice(start, end) for start, end in pairwise([0, *ends])]
        context = client.context(self.name, *(rows[first] for rows in self.rows), mask=self.visible[first])
        for part_rows in appended:
            context.append(*(rows[part_rows] for rows in self.rows), mask=self.visible[part_rows])
        assert context.rows == self.visible[: ends[-1]].sum()
        return context

    def queries(self, rng: np.random.Generator, end: int) -> tuple[list[Array], list[Array]]:
        """Two queries; for self-attention they are rows of the memory, with their positions."""
        if self.module.config.cross:
            width = self.module.config.d_query
            queries = [rng.standard_normal((rows, width), np.float32) for rows in (3, 5)]
            return queries, [np.arange(3), np.arange(5)]
        positions = [np.sort(rng.integers(end, size=rows)) for rows in (3, 5)]
        return [self.rows[0][rows] for rows in positions], positions

    def eager(self, query: Array, positions: Array, end: int, mask: Array) -> tuple[Array, Array]:
        """Context vectors and weights (H, Tq, visible Tk) of eager PyTorch over all rows at once."""
        rows, visible = [part[:end] for part in self.rows], self.visible[:end]
        whole = np.zeros((len(query), end), np.bool_)
        whole[:, visible] = mask
        if self.module.config.cross:
            context, weights = attend(self.module, query, *rows, mask=whole[None])
            return context, weights[..., visible]
        square = np.zeros((end, end), np.bool_)
        answers = []
        for row, position in enumerate(positions):  # each row by itself: several may have one position
            square[position] = whole[row]
            context, weights = attend(self.module, *rows, mask=square[None])
            answers.append((context[position], weights[:, position][:, visible]))
        return np.stack([context for context, _ in answers]), np.stack(
            [weights for _, weights in answers], axis=1
        )


@settings(max_examples=5)
@given(
    parts=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    asked=st.lists(st.tuples(st.integers(0, 3), st.booleans(), st.booleans()), min_size=1, max_size=4),
    masked=st.booleans(),
    seed=st.integers(0, 2**32),
)
@pytest.mark.parametrize("name", NAMES.values(), ids=NAMES)
def test_any_parts_and_any_order_of_queries_and_drops_equal_eager(
    client: AttentionClient,
    name: str,
    parts: list[int],
    asked: list[tuple[int, bool, bool]],
    masked: bool,
    seed: int,
) -> None:
    rng = np.random.default_rng(seed)
    memory = Memory(name, parts, rng, masked=masked)
    config = memory.module.config
    has_positions = bool(config.causal or config.window or config.alibi or config.rotary_theta)
    for index, at_once, dropped in asked:
        part = index % len(parts)
        end = memory.ends[part]
        context = memory.put(client, part, at_once=at_once)
        queries, positions = memory.queries(rng, end)
        masks = [rng.random((len(query), memory.visible[:end].sum())) < 0.8 for query in queries]
        options: Any = {
            "context": context.id,
            "positions": positions if has_positions else None,
            "mask": masks,
        }
        result: Any = client.attend(name, queries, **options, return_weights=True)
        without = client.attend(name, queries, **options)
        expected = [
            memory.eager(query, rows, end, mask)
            for query, rows, mask in zip(queries, positions, masks, strict=True)
        ]
        assert_parity(result.context_vectors, [vectors for vectors, _ in expected])
        assert_parity(without.context_vectors, [vectors for vectors, _ in expected])
        assert_parity(result.attention_weights, [weights for _, weights in expected])
        if dropped:
            context.drop()
            with pytest.raises(NotFoundError):
                client.attend(name, queries, **options)


def test_the_rows_of_a_query_to_self_attention_are_the_last_ones_unless_it_says_where(
    client: AttentionClient,
) -> None:
    """A causal model decodes: each new row is appended, and asked for what it sees."""
    name = next(own for own in NAMES.values() if build(own).config.rotary_theta and build(own).config.causal)
    memory = Memory(name, [4, 1, 1], np.random.default_rng(3), masked=False)
    expected, _ = attend(memory.module, *memory.rows)
    for part, end in enumerate(memory.ends):
        context = memory.put(client, part, at_once=False)
        result: Any = client.attend(name, memory.rows[0][end - 1 : end], context=context)
        assert_parity(result.context_vectors[0], expected[end - 1])

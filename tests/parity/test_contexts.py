"""Queries to stored contexts, however these were put together, equal eager PyTorch over all rows at once."""

from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_serving.model.attention import MultiHeadAttention
from attention_serving.protos.attention.v1 import attention_pb2 as pb
from attention_serving.protos.attention.v1.attention_pb2_grpc import AttentionServiceStub
from scripts.local_server import ServerProcess
from tests.server.api.messages import vectors
from tests.support.eager import Array, assert_parity, attend
from tests.support.systems import SYSTEMS, build

PAIRS = pb.AttentionMask.KIND_PAIRS
NAMES = {each: name for each, name in SYSTEMS.items() if isinstance(build(name), MultiHeadAttention)}


@pytest.fixture(scope="module")
def stub(server: ServerProcess) -> Iterator[AttentionServiceStub]:
    with grpc.insecure_channel(server.target) as channel:
        yield AttentionServiceStub(channel)


class Memory:
    """The rows of one context, in parts, and what a user keeps to ask about them."""

    def __init__(self, name: str, parts: list[int], rng: np.random.Generator, *, masked: bool) -> None:
        self.name, self.module = name, build(name)
        config, total = self.module.config, sum(parts)
        self.rows = {"key": rng.standard_normal((total, config.d_key), np.float32)}
        if config.separate_value:
            self.rows["value"] = rng.standard_normal((total, config.d_value), np.float32)
        self.visible = rng.random(total) < 0.7 if masked else np.ones(total, np.bool_)
        self.ends = np.cumsum(parts).tolist()
        self.visible[[0, *self.ends[:-1]]] = True  # a part needs a row that may be attended to

    def put(self, stub: AttentionServiceStub, part: int, *, at_once: bool) -> str:
        """The id of the context with the rows of all parts up to this one."""
        steps = [self.ends[part]] if at_once else self.ends[: part + 1]
        context_id, start = "", 0
        for end in steps:
            sent = {name: vectors(rows[start:end]) for name, rows in self.rows.items()}
            bits = np.packbits(self.visible[start:end], bitorder="little").tobytes()
            mask = pb.AttentionMask(kind=pb.AttentionMask.KIND_KEYS, bits=bits)
            options: dict[str, Any] = {"model_name": self.name, "mask": mask, **sent}
            if context_id:
                context = stub.AppendContext(pb.AppendContextRequest(id=context_id, **options)).context
            else:
                context = stub.PutContext(pb.PutContextRequest(**options)).context
            context_id, start = context.id, end
        assert context.rows == self.visible[:start].sum()
        return context_id

    def queries(self, rng: np.random.Generator, end: int) -> tuple[list[Array], list[int]]:
        """Two queries; for self-attention they are rows of the memory, with their positions."""
        if self.module.config.cross:
            own = [rng.standard_normal((rows, self.module.config.d_query), np.float32) for rows in (3, 5)]
            return own, [*range(3), *range(5)]
        taken = [np.sort(rng.integers(end, size=rows)) for rows in (3, 5)]
        return [self.rows["key"][at] for at in taken], np.concatenate(taken).tolist()

    def eager(self, query: Array, positions: list[int], end: int, mask: Array) -> tuple[Array, Array]:
        """Context vectors and weights (H, Tq, visible Tk) of eager PyTorch over all rows at once."""
        rows, seen = [own[:end] for own in self.rows.values()], self.visible[:end]
        whole = np.zeros((len(query), end), np.bool_)
        whole[:, seen] = mask
        if self.module.config.cross:
            context, weights = attend(self.module, query, *rows, mask=whole[None])
            return context, weights[..., seen]
        square = np.zeros((end, end), np.bool_)
        found = []
        for row, position in enumerate(positions):  # each row by itself: several may have one position
            square[position] = whole[row]
            context, weights = attend(self.module, *rows, mask=square[None])
            found.append((context[position], weights[:, position][:, seen]))
        return np.stack([context for context, _ in found]), np.stack([own for _, own in found], axis=1)


def numbers(message: pb.VectorSequences | pb.AttentionWeights) -> Array:
    return np.frombuffer(message.data, np.float32)


@settings(max_examples=5)
@given(
    parts=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    asked=st.lists(st.tuples(st.integers(0, 3), st.booleans(), st.booleans()), min_size=1, max_size=4),
    masked=st.booleans(),
    seed=st.integers(0, 2**32),
)
@pytest.mark.parametrize("name", NAMES.values(), ids=NAMES)
def test_any_parts_and_any_order_of_queries_and_drops_equal_eager(
    stub: AttentionServiceStub,
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
        context_id = memory.put(stub, part, at_once=at_once)
        queries, positions = memory.queries(rng, end)
        masks = [rng.random((len(own), memory.visible[:end].sum())) < 0.8 for own in queries]
        flags = np.concatenate([mask.ravel() for mask in masks])
        request = pb.AttendRequest(
            model_name=name,
            context_id=context_id,
            query=vectors(*queries),
            positions=positions if has_positions else [],
            mask=pb.AttentionMask(kind=PAIRS, bits=np.packbits(flags, bitorder="little").tobytes()),
            return_weights=True,
        )
        reply = stub.Attend(request)
        request.return_weights = False
        without = stub.Attend(request)
        starts, expected = iter(positions), []
        for own, mask in zip(queries, masks, strict=True):
            expected.append(memory.eager(own, [next(starts) for _ in own], end, mask))
        context = np.concatenate([own.ravel() for own, _ in expected])
        assert_parity(numbers(reply.context_vectors), context)
        assert_parity(numbers(without.context_vectors), context)
        assert_parity(numbers(reply.attention_weights), np.concatenate([own.ravel() for _, own in expected]))
        if dropped:
            stub.DropContext(pb.DropContextRequest(model_name=name, id=context_id))
            with pytest.raises(grpc.RpcError) as error:
                stub.Attend(request)
            assert error.value.code() is grpc.StatusCode.NOT_FOUND


def test_the_rows_of_a_query_to_self_attention_are_the_last_ones_unless_it_says_where(
    stub: AttentionServiceStub,
) -> None:
    """A causal model decodes: each new row is appended, and asked for what it sees."""
    name = next(own for own in NAMES.values() if build(own).config.rotary_theta and build(own).config.causal)
    memory = Memory(name, [4, 1, 1], np.random.default_rng(3), masked=False)
    expected, _ = attend(memory.module, memory.rows["key"])
    for part, end in enumerate(memory.ends):
        context_id = memory.put(stub, part, at_once=False)
        query = vectors(memory.rows["key"][end - 1 : end])
        reply = stub.Attend(pb.AttendRequest(model_name=name, context_id=context_id, query=query))
        assert_parity(numbers(reply.context_vectors), expected[end - 1])

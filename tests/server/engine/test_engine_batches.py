"""Which sequences run together, in which order, and that each request gets its own result."""

import dataclasses
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_serving.artifact.manifest import GraphKind
from attention_serving.server.engine.limits import Limits
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.run.cost import RunCost
from attention_serving.server.engine.types import Array, MaskKind
from tests.server.samples import CROSS, SELF, assert_answers, validated_of
from tests.server.seams import Held, Recorder, engine_of, outcome

THREADS, PER_THREAD = 4, 12
LONG, SHORT = 1000, 1


def test_results_go_to_their_requests_from_many_threads(models: dict[str, LoadedModel]) -> None:
    engine = engine_of(Limits(max_batch_sequences=5), Recorder())
    together = threading.Barrier(THREADS)

    def ask(thread: int) -> None:
        requests = [
            validated_of(
                models[(SELF, CROSS)[number % 2]],
                [(1 + (thread + number) % 4, 3), (2, 1 + number % 3)],
                seed=100 * thread + number,
                kind=(None, MaskKind.PAIRS)[number % 3 == 0],
                return_weights=number % 4 == 0,
            )
            for number in range(PER_THREAD)
        ]
        together.wait()
        for request in requests:
            engine.submit(request)
        for request in requests:
            assert_answers(request, outcome(request))

    with ThreadPoolExecutor(THREADS) as pool:
        for future in [pool.submit(ask, thread) for thread in range(THREADS)]:
            future.result()
    engine.close()


def test_queued_requests_run_together(self_model: LoadedModel) -> None:
    with Held(self_model) as held:
        requests = [held.submit([(length, length)], seed=length) for length in (3, 1, 4)]
    assert held.later_sizes == [3]
    for request in requests:
        assert_answers(request, outcome(request))


def test_a_batch_has_at_most_max_batch_sequences(self_model: LoadedModel) -> None:
    with Held(self_model, max_batch_sequences=3) as held:
        request = held.submit([(length, length) for length in (3, 1, 4, 1, 5, 2, 2)])
    assert held.later_sizes == [3, 3, 1]
    assert_answers(request, outcome(request))


@pytest.mark.parametrize(
    ("of_sequences", "expected"), [(3, [3, 2]), (1, [1] * 5), (0, [1] * 5)], ids=["three", "one", "none"]
)
def test_a_batch_of_several_sequences_has_at_most_max_batch_bytes(
    self_model: LoadedModel, of_sequences: int, expected: list[int]
) -> None:
    limit = self_model.run_bytes(GraphKind.PLAIN, of_sequences, 6, 6)
    with Held(self_model, max_batch_bytes=limit) as held:
        requests = [held.submit([(6, 6)], seed=seed) for seed in range(5)]
    assert held.later_sizes == expected
    for request in requests:
        assert_answers(request, outcome(request))


@pytest.mark.parametrize(
    ("call_seconds", "expected"),
    [(0.5, [(2 * LONG, 0), (2 * SHORT, 0)]), (4, [(2 * (LONG + SHORT), 2 * (LONG - SHORT))])],
    ids=["lose", "gain"],
)
def test_lengths_that_would_lose_together_run_apart(
    self_model: LoadedModel, call_seconds: float, expected: list[tuple[int, int]]
) -> None:
    operations, _ = self_model.operations(1, LONG, LONG)
    cost = RunCost(call=call_seconds, row=1 / operations, pair=0)
    with Held(self_model, cost=cost) as held:
        requests = [held.submit([(length, length)], seed=length) for length in (LONG, SHORT, LONG, SHORT)]
    assert [(run.tokens, run.padding) for run in held.recorder.runs[1:]] == expected
    for request in requests:
        assert_answers(request, outcome(request))


def test_graphs_and_models_do_not_mix(self_model: LoadedModel, cross_model: LoadedModel) -> None:
    seen: list[tuple[int, bool]] = []

    def tap(inputs: dict[str, Array]) -> None:
        seen.append((len(inputs["query"]), "attention_mask" in inputs))

    twin = dataclasses.replace(self_model)
    with Held(self_model, tap) as held:
        requests = [
            held.submit([(2, 3)], model=model, kind=kind, return_weights=return_weights, seed=seed)
            for seed in range(2)
            for model in (held.model, twin, cross_model)
            for kind in (None, MaskKind.KEYS)
            for return_weights in (False, True)
        ]
    # Plain, weights with and without masks, masks: for each model.
    assert held.later_sizes == [2, 4, 2] * 3
    assert seen == [(2, False), (4, True), (2, True)]
    for request in requests:
        assert_answers(request, outcome(request))


def test_a_report_counts_rows_and_padding(cross_model: LoadedModel) -> None:
    with Held(cross_model) as held:
        held.submit([(2, 3), (4, 1)])
    run = held.recorder.runs[1]
    assert (run.model, run.sequences, run.tokens, run.padding) == (CROSS, 2, 10, 2 * (4 + 3) - 10)
    assert len(run.queue_seconds) == 2
    assert min(run.queue_seconds) > 0
    assert run.seconds > 0


arrivals = st.lists(
    st.tuples(st.integers(1, 7), st.sampled_from([None, *MaskKind]), st.booleans()), min_size=1, max_size=14
)


@given(arrivals=arrivals, most=st.integers(1, 4))
@settings(deadline=None, max_examples=25)
def test_the_oldest_sequence_is_part_of_every_batch(
    self_model: LoadedModel, arrivals: list[tuple[int, MaskKind | None, bool]], most: int
) -> None:
    runs: list[list[float]] = []
    with Held(
        self_model, lambda inputs: runs.append(inputs["query"][:, 0, 0].tolist()), max_batch_sequences=most
    ) as held:
        requests = [
            held.submit([(length, length)], kind=kind, return_weights=weights, seed=seed)
            for seed, (length, kind, weights) in enumerate(arrivals)
        ]
    waiting = [float(request.asked[0].inputs["query"][0, 0]) for request in requests]
    assert len(set(waiting)) == len(waiting)
    for run in runs:
        assert run[0] == waiting[0]
        assert len(run) <= most
        waiting = [mark for mark in waiting if mark not in run]
    assert not waiting
    for request in requests:
        assert_answers(request, outcome(request))


def test_results_do_not_share_memory_with_requests(self_model: LoadedModel) -> None:
    with Held(self_model) as held:
        request = held.submit([(3, 3)])
    (context,) = outcome(request).outputs["context_vectors"]
    assert not np.shares_memory(context, request.asked[0].inputs["query"])

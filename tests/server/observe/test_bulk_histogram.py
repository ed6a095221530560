"""Bulk histograms show what the client library's own show, and no event that waits is lost."""

import threading
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from attention_serving.server.engine.statistics import MOST_WAITING, Waiting
from attention_serving.server.observe.prometheus import BulkHistogram

BUCKETS = (0.1, 1.0, 2.5)
# On a bound, beside it, above all bounds.
values = st.lists(st.one_of(st.sampled_from((0.0, *BUCKETS, 100.0)), st.floats(0, 10)), max_size=40)


def samples(registry: CollectorRegistry) -> dict[str, float]:
    lines = [line for line in generate_latest(registry).decode().splitlines() if "_created" not in line]
    return {line.rpartition(" ")[0]: float(line.split()[-1]) for line in lines if line[0] != "#"}


@given(st.lists(values, max_size=4))
def test_the_samples_are_those_of_the_library(parts: Sequence[Sequence[float]]) -> None:
    ours, library = CollectorRegistry(), CollectorRegistry()
    bulk = BulkHistogram("seconds", "Help.", ["label"], buckets=BUCKETS, registry=ours).labels("a")
    plain = Histogram("seconds", "Help.", ["label"], buckets=BUCKETS, registry=library).labels("a")
    for part in parts:
        bulk.observe_all(part)
        for value in part:
            plain.observe(value)
    own, other = samples(ours), samples(library)
    assert own.keys() == other.keys()
    # Sums are rounded in another order.
    assert all(abs(own[name] - other[name]) <= 1e-9 * (1 + other[name]) for name in own)


def test_no_event_is_lost_and_few_wait() -> None:
    counted: list[int] = []
    waiting = Waiting[int](lambda events: counted.append(len(events)))

    def work() -> None:
        for _ in range(3 * MOST_WAITING):
            waiting.add(1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        waiting.flush()
    for _ in range(10 * MOST_WAITING):
        waiting.add(1)
    assert sum(counted) >= 21 * MOST_WAITING
    waiting.flush()
    assert sum(counted) == 22 * MOST_WAITING

"""Buffered metrics show what the client library's own metrics show."""

import threading
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from attention_serving.server.buffered_metrics import BufferedCounter, BufferedHistogram

BUCKETS = (0.1, 1.0, 2.5)
Event = tuple[str, float]
# On a bound, beside it, above all bounds.
values = st.one_of(st.sampled_from((0.0, *BUCKETS, 100.0)), st.floats(0, 10))
events = st.lists(st.tuples(st.sampled_from("ab"), values), max_size=40)


def shown(
    counter: type[Counter], histogram: type[Histogram], parts: Sequence[Sequence[Event]]
) -> list[dict[str, float]]:
    """The samples after each part of the events."""
    registry = CollectorRegistry()
    count = counter("count", "Help.", ["label"], registry=registry)
    seconds = histogram("seconds", "Help.", ["label"], buckets=BUCKETS, registry=registry)
    found = []
    for part in parts:
        for label, value in part:
            count.labels(label).inc(value)
            seconds.labels(label).observe(value)
        lines = [line for line in generate_latest(registry).decode().splitlines() if "_created" not in line]
        found.append({line.rpartition(" ")[0]: float(line.split()[-1]) for line in lines if line[0] != "#"})
    return found


@given(events, events)
def test_the_samples_are_those_of_the_library(first: list[Event], second: list[Event]) -> None:
    buffered = shown(BufferedCounter, BufferedHistogram, (first, second, ()))
    expected = shown(Counter, Histogram, (first, second, ()))
    for own, other in zip(buffered, expected, strict=True):
        assert own.keys() == other.keys()
        # Sums are rounded in another order.
        assert all(abs(own[name] - other[name]) <= 1e-9 * (1 + other[name]) for name in own)


def test_no_event_is_lost_while_the_metrics_are_collected() -> None:
    registry = CollectorRegistry()
    count = BufferedCounter("count", "Help.", ["label"], registry=registry)
    seconds = BufferedHistogram("seconds", "Help.", ["label"], buckets=BUCKETS, registry=registry)

    def work() -> None:
        for _ in range(2000):
            count.labels("a").inc()
            seconds.labels("a").observe(0.5)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        generate_latest(registry)
    for thread in threads:
        thread.join()
    assert registry.get_sample_value("count_total", {"label": "a"}) == 8000
    assert registry.get_sample_value("seconds_count", {"label": "a"}) == 8000
    assert registry.get_sample_value("seconds_sum", {"label": "a"}) == 4000

import numpy as np
import pytest

from benchmarks.results import (
    ECHO,
    LOWEST,
    ONNX,
    SERVICE,
    TRITON,
    TRITON_CPP,
    TRITON_CPP_SINGLE,
    EnrichmentRates,
    Index,
    MemoryCurve,
    MemorySample,
    Percentiles,
)
from benchmarks.summary import (
    enrichment_ratio,
    memory_after_a_minute,
    memory_at_end,
    memory_growth,
    of,
    p50,
    ratio,
    sequence_rate,
    spread,
)
from benchmarks.targets import Target, share_of_ceiling, targets
from benchmarks.workload import NARROW, SHORT, WIDE, Cell
from tests.benchmarks.measurements import measurement

CELL = Cell(WIDE, SHORT, 32)
SINGLE = Cell(WIDE, SHORT, 1)


def test_percentiles_are_in_microseconds() -> None:
    latencies = np.arange(1, 100_001, dtype=np.int64) * 1_000  # 1 µs to 100 ms
    found = Percentiles.of(latencies)

    assert found.count == 100_000
    for value, expected in (
        (found.p50, 50_000),
        (found.p90, 90_000),
        (found.p99, 99_000),
        (found.p99_9, 99_900),
    ):
        assert value == pytest.approx(expected, rel=2e-3)


def test_a_percentile_with_too_few_requests_beyond_it_is_left_out() -> None:
    found = Percentiles.of(np.arange(1, 101, dtype=np.int64) * 1_000)

    assert found.p99 is not None
    assert found.p99_9 is None
    assert Percentiles.of(np.arange(1, 1_001, dtype=np.int64) * 1_000).p99_9 is not None
    nothing = Percentiles.of(np.array([], np.int64))
    assert (nothing.count, nothing.p50, nothing.p99) == (0, None, None)


def test_spread_is_median_and_range() -> None:
    found = spread([3.0, None, 1.0, 2.0])

    assert found is not None
    assert (found.median, found.low, found.high, found.ratio) == (2.0, 1.0, 3.0, 3.0)
    assert spread([None]) is None


def test_ratios_are_taken_round_by_round() -> None:
    # In round 1 the machine is half as fast for both systems; their ratio does not change.
    rounds = [(0, 200.0, 100.0), (1, 100.0, 50.0), (2, 300.0, 100.0)]
    index = Index(
        tuple(measurement(CELL, SERVICE, at, rate=rate) for at, rate, _ in rounds)
        + tuple(measurement(CELL, TRITON, at, rate=rate) for at, _, rate in reversed(rounds))
    )
    found = ratio(index, CELL, SERVICE, TRITON, sequence_rate)

    assert found == spread([2.0, 2.0, 3.0])
    assert ratio(index, CELL, SERVICE, ECHO, sequence_rate) is None


def test_the_ceiling_counts_compute_and_transport() -> None:
    service = measurement(CELL, SERVICE, rate=200.0)
    run = measurement(CELL, ONNX, rate=250.0)  # 4 ms
    echo = measurement(CELL, ECHO, client_us=1_200, server_us=800)  # 1 ms on each of two cores

    assert share_of_ceiling(service, run, echo, cores=2) == pytest.approx(1.0)


def test_rates_are_compared_with_the_faster_configuration_of_each_round() -> None:
    rounds = [(0, 90.0, 100.0, 50.0), (1, 90.0, 50.0, 100.0), (2, 60.0, 100.0, 50.0)]
    index = Index(
        tuple(
            measurement(CELL, system, at, rate=rate)
            for at, *rates in rounds
            for system, rate in zip((SERVICE, TRITON_CPP, TRITON_CPP_SINGLE), rates, strict=True)
        )
    )
    measured = [target for target in targets(index, None, None, cores=2) if target.value is not None]

    assert [(target.case, target.value, target.verdict) for target in measured] == [
        (CELL.name, spread([0.9, 0.9, 0.6]), "met")
    ]


def test_the_latency_of_one_request_is_compared_at_the_lowest_setting() -> None:
    index = Index((measurement(SINGLE, LOWEST, p50=600.0), measurement(SINGLE, TRITON_CPP_SINGLE, p50=500.0)))
    measured = [target for target in targets(index, None, None, cores=2) if target.value is not None]

    assert [(target.value, target.verdict) for target in measured] == [(spread([1.2]), "missed")]


def test_enrichment_is_compared_round_by_round() -> None:
    rates = EnrichmentRates("2026-01-02 03:04 UTC", 1000, (100.0, 200.0, 100.0), (80.0, 160.0, 70.0))
    measured = [target for target in targets(Index(()), None, rates, cores=2) if target.value is not None]

    assert enrichment_ratio(rates) == spread([0.8, 0.8, 0.7])
    assert [target.verdict for target in measured] == ["met"]


@pytest.mark.parametrize(
    ("value", "at_most", "verdict"),
    [(1.0, False, "met"), (0.99, False, "missed"), (1.0, True, "met"), (1.01, True, "missed")],
)
def test_verdicts(value: float, at_most: bool, verdict: str) -> None:
    assert Target("case", "what", 1.0, spread([value]), at_most=at_most).verdict == verdict


def test_memory_growth_starts_after_one_minute() -> None:
    samples = tuple(
        MemorySample(float(at), 100 if at < 30 else 200 if at < 300 else 210) for at in range(600)
    )
    memory = MemoryCurve("2026-01-02 03:04 UTC", "load", 600.0, 1, samples)

    assert (memory_after_a_minute(memory), memory_at_end(memory)) == (200, 210)
    assert memory_growth(memory) == spread([1.05])
    assert memory_growth(MemoryCurve("2026-01-02 03:04 UTC", "load", 70.0, 1, samples[:70])) is None


def test_metrics_that_were_not_measured_are_absent() -> None:
    index = Index((measurement(CELL, SERVICE, p50=None),))

    assert of(index, CELL, SERVICE, p50) is None
    assert of(index, Cell(NARROW, SHORT, 1), SERVICE, p50) is None

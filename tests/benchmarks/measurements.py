"""Invented measurements, with which summaries and reports are tested without a clock."""

from benchmarks.results import Measurement, Percentiles
from benchmarks.workload import Cell


def measurement(
    cell: Cell,
    system: str,
    at_round: int = 0,
    *,
    rate: float = 100.0,
    p50: float | None = 1000.0,
    client_us: float = 0.0,
    server_us: float = 0.0,
) -> Measurement:
    return Measurement(
        cell=cell,
        system=system,
        round=at_round,
        sequences_per_second=rate,
        tokens_per_second=rate * 50,
        seconds=1.0,
        latency=Percentiles(100, p50),
        client_us=client_us,
        server_us=server_us,
        how="8 in flight",
    )

"""A server process under attack: its memory, threads and descriptors from /proc, metrics, and requests."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from attention_serving.protos.attention.v1 import attention_pb2 as pb
from attention_serving.server.observe.metrics import LOAD
from benchmarks.processes import PROC
from scripts.local_server import ServerProcess, serving
from tests.server.api.messages import vectors
from tests.support.eager import Array
from tests.support.prometheus import scrape

MODEL, WIDTH = "multi-head-768x12", 768
KIB, MIB = 1 << 10, 1 << 20
PATIENCE_SECONDS = 30.0
POLL_SECONDS = 0.02
OWN_CONNECTION = [
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
]
# Writing this to clear_refs sets the peak of resident memory (VmHWM) to what is resident now.
RESET_PEAK = "5"


@dataclass(frozen=True)
class Readings:
    """What the kernel says about a process: bytes and counts."""

    resident: int
    peak: int
    threads: int
    descriptors: int


def readings(pid: int) -> Readings:
    """Reads /proc/PID/status, and counts the descriptors."""
    lines = (PROC / str(pid) / "status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return Readings(
        resident=int(fields["VmRSS"].split()[0]) * KIB,
        peak=int(fields["VmHWM"].split()[0]) * KIB,
        threads=int(fields["Threads"]),
        descriptors=len(os.listdir(PROC / str(pid) / "fd")),  # noqa: PTH208 - names only
    )


def reset_peak(pid: int) -> int:
    """Makes the peak of resident memory count from now; returns the resident bytes."""
    (PROC / str(pid) / "clear_refs").write_text(RESET_PEAK)
    return readings(pid).resident


@contextmanager
def server_of(repository: Path, folder: Path, *options: str) -> Iterator[ServerProcess]:
    """A server of a repository, with its log in a folder."""
    with serving(repository, folder / f"server-{time.monotonic_ns()}.log", *options) as process:
        yield process


def gauges_in_use(server: ServerProcess) -> dict[str, float]:
    """The gauges of what requests hold at this moment: each must be 0 once the server is empty."""
    held = {f"attention_{name}" for name in LOAD} - {"attention_open_connections"}
    return {name: value for (name, _), value in scrape(server.metrics_port).items() if name in held}


def wait_until(condition: Callable[[], bool], seconds: float = PATIENCE_SECONDS) -> bool:
    """Polls a condition of another process; returns whether it came true in time."""
    until = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(POLL_SECONDS)
    return True


def random_rows(rows: int, width: int = WIDTH) -> Array:
    """Standard normal rows, (T, d)."""
    return np.random.default_rng(0).standard_normal((rows, width), dtype=np.float32)


def attend_message(model: str, *sequences: Array, return_weights: bool = False) -> pb.AttendRequest:
    """A request of attention.v1 for sequences (T, d) of one width."""
    return pb.AttendRequest(model_name=model, query=vectors(*sequences), return_weights=return_weights)

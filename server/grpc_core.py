"""Settings of gRPC's core that it takes from environment variables, when grpc is imported."""

import os
from importlib.metadata import version

# The releases of grpcio with which the switch was measured and tested.
KNOWN_RELEASES = ("1.85.",)
# By default, the core reads and writes on threads of its own, and hands each event over to the thread that
# polls the completion queue. Without them that thread does both: a quarter less processor time for a small
# request. An internal switch of gRPC, listed in src/core/lib/experiments/experiments.yaml.
WITHOUT_POLLING_THREADS = "-event_engine_listener"


def configure(*, completion_queue: bool) -> None:
    """Sets the variables that are not set. Must be called before grpc is imported.

    Args:
        completion_queue: Whether the transport polls a completion queue.
    """
    # The core has a log of its own. What it calls errors its callers report.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    if completion_queue and version("grpcio").startswith(KNOWN_RELEASES):
        os.environ.setdefault("GRPC_EXPERIMENTS", WITHOUT_POLLING_THREADS)

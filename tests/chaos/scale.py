"""How long the chaos cases run: CHAOS=quick or CHAOS=full in the environment."""

import os
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Scale:
    """The extent of a run, in seconds and in repetitions.

    Attributes:
        capacity_seconds: Closed loop that measures the capacity.
        overload_seconds: Open loop at a multiple of the capacity.
        drains: Drains under load.
        kills: Workers that are killed.
        soak_seconds: Mixed load.
        pairs: Small calls beside long ones.
        mutations: Mutated requests.
        watched_seconds: Each phase of the drill of several servers.
        frozen_seconds: A frozen server. A client finds out within 20 seconds.
    """

    name: str
    capacity_seconds: float
    overload_seconds: float
    drains: int
    kills: int
    soak_seconds: float
    pairs: int
    mutations: int
    watched_seconds: float
    frozen_seconds: float


QUICK = Scale(
    name="quick",
    capacity_seconds=4,
    overload_seconds=10,
    drains=5,
    kills=4,
    soak_seconds=60,
    pairs=15,
    mutations=20_000,
    watched_seconds=2,
    frozen_seconds=4,
)
FULL = Scale(
    name="full",
    capacity_seconds=10,
    overload_seconds=60,
    drains=50,
    kills=20,
    soak_seconds=600,
    pairs=30,
    mutations=50_000,
    watched_seconds=5,
    frozen_seconds=25,
)
SCALES = {scale.name: scale for scale in (QUICK, FULL)}


def current() -> Scale:
    """The scale that the environment variable CHAOS names; quick by default.

    Raises:
        ValueError: There is no such scale.
    """
    name = os.environ.get("CHAOS") or QUICK.name
    if name not in SCALES:
        raise ValueError(f"CHAOS={name}: must be one of {', '.join(SCALES)}")
    return SCALES[name]

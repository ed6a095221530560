"""When the requests of an open loop are due."""

import numpy as np
from numpy.typing import NDArray


def poisson(rate: float, seconds: float, *, seed: int) -> NDArray[np.int64]:
    """Nanoseconds after the start at which requests are due: a Poisson process, the same for one seed.

    Args:
        rate: Requests per second on average.
        seconds: How long requests are issued.
        seed: Of the random gaps.

    Raises:
        ValueError: Rate or seconds are not positive.
    """
    if rate <= 0 or seconds <= 0:
        raise ValueError(f"rate={rate}, seconds={seconds}: both must be positive")
    rng = np.random.default_rng(seed)
    count = max(1, int(rate * seconds))
    # Given their number, the arrivals of a Poisson process are uniform over its time.
    return np.sort(rng.uniform(0, seconds * 1e9, count)).astype(np.int64)

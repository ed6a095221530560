"""Deadlines on `time.monotonic`'s clock."""

import math
import time

# If a call has no deadline, gRPC's core reports one that is centuries away.
FOREVER_SECONDS = 365 * 24 * 3600.0


def deadline_after(seconds: float) -> float:
    """The moment that many seconds from now; infinite if that is more than a year."""
    return math.inf if seconds > FOREVER_SECONDS else time.monotonic() + seconds

"""Removes values of gauges, also from those that several processes publish together."""

import math
import os

from prometheus_client import Gauge

# In the files of several processes, from which the library cannot remove a value. It is the least of all: the
# value of another process takes its place in a maximum, and none in a minimum.
NO_VALUE = -math.inf
FOLDER_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"


def forget(gauge: Gauge, *labels: str) -> None:
    """Removes the value of these labels, if there is one."""
    if FOLDER_VARIABLE in os.environ:
        gauge.labels(*labels).set(NO_VALUE)
    else:
        gauge.remove(*labels)

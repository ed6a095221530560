"""Durations of runs on a device, for tests of the cost model and of the scheduler.

These are SYNTHETIC: no device was measured. They follow from round figures for a large GPU over PCI Express:
110 microseconds to launch the kernels of a run, copies at 25 GB/s in both directions, 40 TFLOP/s in fp32 once
a run has many hundred rows, and up to 8 % of noise. `python -m benchmarks.cuda` records real ones.
"""

import numpy as np

from attention_serving.server.engine.run.cost import TIMED_SIZES_ON_DEVICE

LAUNCH_SECONDS = 110e-6
BYTES_PER_SECOND, OPERATIONS_PER_SECOND = 25e9, 40e12
# Below this, the device is not filled.
ROWS_OF_HALF_THE_RATE = 200
NOISE = 0.08


def seconds(width: int, count: int, length: int) -> float:
    """How long self-attention of that width takes for `count` sequences, without noise."""
    rows = count * length
    operations = 8 * width * width * rows + 4 * width * rows * length
    copies = 2 * 4 * width * rows / BYTES_PER_SECOND
    return LAUNCH_SECONDS + copies + operations / OPERATIONS_PER_SECOND * (1 + ROWS_OF_HALF_THE_RATE / rows)


def timed(width: int) -> dict[tuple[int, int], float]:
    """By number and length of sequences, what calibration would measure."""
    noise = np.random.default_rng(width).uniform(1, 1 + NOISE, len(TIMED_SIZES_ON_DEVICE))
    return {
        size: seconds(width, *size) * float(factor)
        for size, factor in zip(TIMED_SIZES_ON_DEVICE, noise, strict=True)
    }

"""How far a served result may differ from eager PyTorch."""

from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import NonNegativeFloat

from artifact.record import Record


class Tolerance(Record):
    """A value passes where |value - eager| <= atol + rtol * |eager|."""

    rtol: NonNegativeFloat
    atol: NonNegativeFloat

    def error(self, value: NDArray[Any], eager: NDArray[Any]) -> float:
        """Largest |value - eager|, equal infinities and two NaNs counted as equal.

        Infinite where the shapes differ or where only one side is NaN.
        """
        if value.shape != eager.shape:
            return float("inf")
        if value.size == 0:
            return 0.0
        same = (value == eager) | (np.isnan(value) & np.isnan(eager))
        with np.errstate(invalid="ignore", over="ignore"):
            difference = np.where(same, 0.0, np.abs(value - eager))
        return float(np.max(np.nan_to_num(difference, nan=np.inf, posinf=np.inf)))

    def holds(self, value: NDArray[Any], eager: NDArray[Any]) -> bool:
        """Whether every element passes; two NaNs do."""
        return value.shape == eager.shape and bool(
            np.allclose(value, eager, rtol=self.rtol, atol=self.atol, equal_nan=True)
        )

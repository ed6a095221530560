"""The largest accepted difference between a served result and eager PyTorch, a value of a manifest."""

from typing import Annotated, Any, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat

# Axes of an output with a vector for each sequence.
PER_SEQUENCE = 2


# A size or a number of things. Why numbers are bounded: see `artifact.manifest`.
Size = Annotated[int, Field(ge=1, le=2**31 - 1)]


class Record(BaseModel):
    """An immutable value of a manifest. Unknown fields, NaN and infinity are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Tolerance(Record):
    """A value passes if |value - eager| <= atol + rtol * |eager|; vectors pass by a stated cosine."""

    rtol: NonNegativeFloat
    atol: NonNegativeFloat
    cosine: Annotated[float, Field(ge=0, lt=1)] | None = None
    """For text encoders in 8 bits, in place of the two: the smallest accepted cosine of the angle between a
    vector and that of eager PyTorch. Outputs with a vector for each sequence (B, d) pass by their smallest
    cosine; those with a vector for each row, such as token vectors and attention weights, by their mean."""

    def __str__(self) -> str:
        """The rule in one line."""
        values = f"{self.atol:g} + {self.rtol:g} x |value|"
        return values if self.cosine is None else f"a cosine of {self.cosine:g}"

    def scaled(self, factor: float) -> Self:
        """The tolerance of values that are larger by a factor."""
        return self.model_copy(update={"atol": self.atol * factor})

    def error(self, value: NDArray[Any], eager: NDArray[Any]) -> float:
        """Largest |value - eager|. Equal infinities count as equal.

        Booleans count as 0 and 1. The error is infinite if the shapes differ, or if a side is NaN: two NaNs
        prove nothing.
        """
        if value.shape != eager.shape:
            return float("inf")
        return _largest(_differences(value, eager))

    def ratio(self, value: NDArray[Any], eager: NDArray[Any]) -> float:
        """Largest |value - eager| / (atol + rtol * |eager|): the part of the tolerance that is used.

        At most 1 if every element passes. Special values are treated as in `error`.
        """
        if value.shape != eager.shape:
            return float("inf")
        if self.cosine is not None:
            similarities = cosines(value, eager)
            return float(1 - (similarities.min() if value.ndim == PER_SEQUENCE else similarities.mean())) / (
                1 - self.cosine
            )
        differences = _differences(value, eager)
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            ratios = differences / (self.atol + self.rtol * np.abs(eager, dtype=np.float64))
        return _largest(np.where(differences == 0, 0.0, ratios))

    def holds(self, value: NDArray[Any], eager: NDArray[Any]) -> bool:
        """Whether every element passes."""
        return self.ratio(value, eager) <= 1


def _differences(value: NDArray[Any], eager: NDArray[Any]) -> NDArray[np.float64]:
    """|value - eager| of each element. NaN where they differ and either is infinite or NaN."""
    with np.errstate(invalid="ignore", over="ignore"):
        # In float64, where differences of booleans exist and those of integers do not overflow.
        return np.where(value == eager, 0.0, np.abs(np.subtract(value, eager, dtype=np.float64)))


def _largest(values: NDArray[np.float64]) -> float:
    """The largest element, infinite if one is not a number; 0 if there is none."""
    return float(np.max(np.nan_to_num(values, nan=np.inf, posinf=np.inf), initial=0.0))


def cosines(values: NDArray[Any], eager: NDArray[Any]) -> NDArray[np.float64]:
    """The cosine of the angle between vectors (..., d) that belong together; 0 for NaN, 1 if both are 0."""
    pairs = np.asarray(values, np.float64), np.asarray(eager, np.float64)
    lengths = [np.linalg.norm(vectors, axis=-1) for vectors in pairs]
    with np.errstate(divide="ignore", invalid="ignore"):
        similarities = (pairs[0] * pairs[1]).sum(axis=-1) / (lengths[0] * lengths[1])
    return np.where((lengths[0] == 0) & (lengths[1] == 0), 1.0, np.nan_to_num(similarities, nan=0.0))

"""The base of every value that a manifest holds."""

from pydantic import BaseModel, ConfigDict


class Record(BaseModel):
    """Immutable, without unknown fields, NaN or infinity."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

"""The base class of all values in a manifest."""

from pydantic import BaseModel, ConfigDict


class Record(BaseModel):
    """An immutable value. Unknown fields, NaN and infinity are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

"""Options of batching."""

from pydantic import BaseModel, ByteSize, Field, NonNegativeFloat, PositiveInt

from attention_serving.server.engine.limits import MIB
from attention_serving.server.settings.units import PositiveBytes


class Batching(BaseModel):
    """How requests are combined into batches."""

    max_batch_sequences: PositiveInt = Field(
        64, description="Maximum number of sequences in one batch, at least 1."
    )
    max_batch_bytes: PositiveBytes = Field(
        ByteSize(256 * MIB), description="Maximum memory for a batch of two or more sequences, above 0."
    )
    batch_delay_seconds: NonNegativeFloat = Field(
        0.0,
        allow_inf_nan=False,
        description="Maximum batching delay, in seconds, at least 0. 0 adds no delay.",
    )

"""Options of the size of requests, and of the memory that they may occupy."""

from typing import Annotated

from pydantic import BaseModel, ByteSize, Field, PositiveInt, ValidationInfo, field_validator

from attention_serving.server.engine.limits import MIB
from attention_serving.server.settings.units import PositiveBytes


class RequestLimits(BaseModel):
    """How large requests may be, and how much memory they may occupy."""

    max_sequence_length: PositiveInt = Field(
        8192, description="Maximum number of rows in one sequence, at least 1."
    )
    max_sequences: PositiveInt = Field(
        4096, description="Maximum number of sequences in one request, at least 1."
    )
    max_text_bytes: PositiveBytes = Field(
        ByteSize(MIB), description="Maximum size of one text in UTF-8, in bytes, above 0."
    )
    max_memory: Annotated[ByteSize, Field(ge=0)] = Field(
        ByteSize(0),
        description="Maximum memory for requests and runs, beside the loaded models, at least 0."
        " 0 uses half of the memory of the machine or container, divided by the number of workers.",
    )
    max_in_flight_bytes: Annotated[ByteSize, Field(ge=0)] = Field(
        ByteSize(0),
        description="Part of max_memory for requests, from arrival until the reply is sent, below max_memory."
        " 0 uses a quarter of max_memory, at most 1GiB. Runs use the rest.",
    )

    @field_validator("max_in_flight_bytes")
    @classmethod
    def _leaves_memory_for_runs(cls, value: ByteSize, info: ValidationInfo) -> ByteSize:
        total = info.data.get("max_memory")
        if total and value >= total:
            raise ValueError(f"must be below max_memory, which is {total} bytes")
        return value

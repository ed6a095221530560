"""Types of options: ports, seconds and bytes."""

from typing import Annotated

from pydantic import ByteSize, Field

Port = Annotated[int, Field(ge=0, le=65535)]
# An upper bound, because the core counts milliseconds in 32 bits.
Seconds = Annotated[float, Field(ge=0, le=1_000_000, allow_inf_nan=False)]
PositiveBytes = Annotated[ByteSize, Field(gt=0)]

"""Options of the processes: how many serve, how they stop, and what they log."""

from typing import Literal

from pydantic import BaseModel, Field, NonNegativeFloat


class Process(BaseModel):
    """How many processes serve, how they stop, and what they log."""

    workers: int = Field(
        1,
        ge=1,
        le=1024,
        description="Number of server processes that share the port, 1 to 1024."
        " Every limit applies to each process.",
    )
    worker_timeout_seconds: NonNegativeFloat = Field(
        30.0,
        allow_inf_nan=False,
        description="How long a worker process or the HTTP process may fail to answer its parent before it is"
        " killed and replaced, in seconds, at least 0. 0 disables the check.",
    )
    grace_seconds: NonNegativeFloat = Field(
        30.0,
        description="How long calls in progress may take to finish during shutdown, in seconds,"
        " at least 0. 0 cancels them at once. A process that has not ended a few seconds later is killed.",
    )
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = Field(
        "INFO", description="Minimum level of logged events: DEBUG (logs every call), INFO, WARNING or ERROR."
    )
    log_format: Literal["text", "json"] = Field(
        "text", description="Format of the log: key=value pairs or one JSON object per line."
    )

"""The steps of a change of models, which every process of a service takes. Does not import the engine."""

from dataclasses import dataclass
from enum import StrEnum


class Step(StrEnum):
    """A step of a change, which every process of the service takes."""

    LOAD = "load"
    UNLOAD = "unload"
    COMMIT = "commit"
    ABORT = "abort"


@dataclass(frozen=True)
class StepRequest:
    """Asks a process to take a step.

    Attributes:
        step: The step.
        number: Identifies the change.
        name: Name of the model.
    """

    step: Step
    number: str
    name: str

"""Replays golden vectors on a session: how far its outputs are from those of eager PyTorch."""

from typing import NamedTuple

from attention_serving.artifact.golden import GoldenCase
from attention_serving.artifact.tolerance import Tolerance
from attention_serving.server.engine.session import RunControl, Session


class Difference(NamedTuple):
    """The difference of one output from eager PyTorch.

    Attributes:
        ratio: The part of the tolerance that is used; above 1 the output misses it.
        error: Largest absolute difference.
        output: Name of the output.
    """

    ratio: float
    error: float
    output: str


class MissingOutputError(Exception):
    """The graph does not have an output that the golden vectors contain; the message is its name."""


def replay(
    case: GoldenCase, session: Session, tolerance: Tolerance, control: RunControl | None = None
) -> list[Difference]:
    """Runs a golden case and compares every output that it contains.

    Args:
        case: Inputs of the session's graph, and outputs of eager PyTorch.
        session: The session, which may serve requests at the same time.
        tolerance: Largest accepted difference.
        control: Can end the run early.

    Raises:
        MissingOutputError: The graph lacks an output.
        MemoryError: The run needs more memory than the arena may take.
        Exception: The run fails, or is ended early.
    """
    outputs = session.run(case.inputs, control)
    if missing := sorted(case.outputs.keys() - outputs.keys()):
        raise MissingOutputError(missing[0])
    return [
        Difference(tolerance.ratio(outputs[name], eager), tolerance.error(outputs[name], eager), name)
        for name, eager in case.outputs.items()
    ]

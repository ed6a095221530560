"""What a run measures: models, precisions, sizes, and how long each step may take."""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

# A causal module whose queries and keys differ in length. No preset has that.
CAUSAL_CROSS = "causal-cross-64x4"
PRECISIONS = ("fp32", "fp16", "bf16")
MOST_ROWS = 65_536
"""Cells with more rows are left out: batch times length."""


@dataclass(frozen=True)
class Plan:
    """The extent of a run.

    Attributes:
        models: Names of presets, and CAUSAL_CROSS; empty for all.
        wide: The preset whose rates are measured.
        lengths: Rows of a sequence.
        batches: Sequences of a run.
        seconds: Duration of each timed measurement.
        kernel_models: Presets whose kernels are looked up in the runtime's log.
        loads: Requests in flight, sequences of a request, rows of a sequence; through the server.
    """

    name: str
    models: tuple[str, ...] = ()
    wide: str = "multi-head-768x12"
    lengths: tuple[int, ...] = (6, 32, 128, 512, 2048, 8192)
    batches: tuple[int, ...] = (1, 8, 64, 256)
    seconds: float = 0.2
    kernel_models: tuple[str, ...] = ("multi-head-768x12", "causal-768x12", "rotary-768x12", "cross-768x12")
    loads: tuple[tuple[int, int, int], ...] = (
        (1, 1, 6),
        (32, 1, 6),
        (256, 1, 6),
        (1, 1, 128),
        (32, 1, 128),
        (2, 256, 128),
        (4, 8, 2048),
    )

    def cells(self) -> list[tuple[int, int]]:
        """Batch and length of each measurement in process, the smallest first."""
        found = [(batch, length) for batch in self.batches for length in self.lengths]
        return sorted((cell for cell in found if cell[0] * cell[1] <= MOST_ROWS), key=lambda c: c[0] * c[1])


FULL = Plan("full")
QUICK = Plan(
    "quick",
    models=("multi-head-64x4", "causal-self-attention", CAUSAL_CROSS),
    wide="multi-head-64x4",
    lengths=(6, 64),
    batches=(1, 8),
    seconds=0.05,
    kernel_models=("multi-head-64x4",),
    loads=((1, 1, 6), (8, 1, 6), (1, 8, 64)),
)
PLANS = {plan.name: plan for plan in (FULL, QUICK)}

# For all steps together: a machine is often lent for ten minutes.
USUAL_SECONDS = 540
# Steps in their order, and how long each may take, in seconds. Later ones use what the earlier wrote.
STEPS = {
    "export": 200,
    "proof": 150,
    "kernels": 90,
    "costs": 60,
    "onnx": 90,
    "torch": 60,
    "service": 120,
    "graphs": 45,
}


@dataclass(frozen=True)
class Run:
    """One run of this program, as its steps get it.

    Attributes:
        device: cuda or cpu.
        plan: Name of the plan.
        work: Folder of findings and logs.
        models: Model repository.
    """

    device: str
    plan: str
    work: Path
    models: Path

    @property
    def extent(self) -> Plan:
        """The plan."""
        return PLANS[self.plan]

    def as_json(self) -> dict[str, Any]:
        """JSON values."""
        return {name: str(value) for name, value in asdict(self).items()}

    @classmethod
    def from_json(cls, values: dict[str, str]) -> "Run":
        """From what `as_json` returned."""
        folders = {name: Path(values[name]) for name in ("work", "models")}
        return cls(device=values["device"], plan=values["plan"], **folders)


@dataclass(frozen=True)
class Outcome:
    """How a step ended.

    Attributes:
        problem: Why it did not end well; empty if it did.
    """

    step: str
    seconds: float
    problem: str = field(default="")

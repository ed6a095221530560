"""What a run measures, where its findings lie, and the modules in eager PyTorch."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

# A causal module whose queries and keys differ in length. No preset has that.
CAUSAL_CROSS = "causal-cross-64x4"
PRECISIONS = ("fp32", "fp16", "bf16")
MOST_ROWS = 65_536
"""Cells with more rows are left out: batch times length."""
# For all steps together: a machine is often lent for ten minutes.
USUAL_SECONDS = 540
# Steps in their order, and how long each may take, in seconds. Later ones use what the earlier wrote.
STEPS = {"export": 200, "proof": 150, "onnx": 90, "torch": 60, "service": 120}
Record = dict[str, Any]


@dataclass(frozen=True)
class Plan:
    """The extent of a run.

    Attributes:
        models: Names of presets, and CAUSAL_CROSS; empty for all.
        wide: The preset whose rates are measured, and its width.
        lengths: Rows of a sequence; batches: sequences of a run.
        seconds: Duration of each timed measurement in process; served_seconds: through the server.
        loads: Requests in flight, sequences of a request, rows of a sequence; through the server.
        server_options: Batches as large as a device wants them; see docs/cuda.md.
    """

    models: tuple[str, ...] = ()
    wide: str = "multi-head-768x12"
    width: int = 768
    lengths: tuple[int, ...] = (6, 32, 128, 512, 2048, 8192)
    batches: tuple[int, ...] = (1, 8, 64, 256)
    seconds: float = 0.2
    served_seconds: float = 2.0
    loads: tuple[tuple[int, int, int], ...] = (
        *((count, 1, 6) for count in (1, 32, 256)),
        *((count, 1, 128) for count in (1, 32)),
        (2, 256, 128),
        (4, 8, 2048),
    )
    server_options: tuple[str, ...] = (
        "--max-message-bytes=512MiB",
        "--max-memory=48GiB",
        "--max-in-flight-bytes=8GiB",
        "--max-batch-sequences=256",
    )

    def cells(self) -> list[tuple[int, int]]:
        """Batch and length of each measurement in process, the smallest first."""
        found = [(batch, length) for batch in self.batches for length in self.lengths]
        return sorted((cell for cell in found if cell[0] * cell[1] <= MOST_ROWS), key=lambda c: c[0] * c[1])


FULL = Plan()
QUICK = Plan(
    models=("multi-head-64x4", CAUSAL_CROSS),
    wide="multi-head-64x4",
    width=64,
    lengths=(6, 64),
    batches=(1, 8),
    seconds=0.05,
    served_seconds=0.3,
    loads=((1, 1, 6), (8, 1, 6), (1, 8, 64)),
    server_options=(),
)


class Case(NamedTuple):
    """A module in one precision."""

    module: str
    precision: str

    @property
    def name(self) -> str:
        """Name of the model in the repository."""
        return self.module if self.precision == "fp32" else f"{self.module}-{self.precision}"

    def folder(self, repository: Path) -> Path:
        """Folder of the artifact."""
        return repository / self.name / "1"


@dataclass(frozen=True)
class Run:
    """One run of this program, as its steps get it.

    Attributes:
        device: cuda or cpu.
        quick: Whether few models and sizes are measured.
        work: Folder of findings and logs.
        models: Model repository.
    """

    device: str
    quick: bool
    work: Path
    models: Path

    @property
    def plan(self) -> Plan:
        """Its extent."""
        return QUICK if self.quick else FULL

    def cases(self) -> Iterator[Case]:
        """All models of a run."""
        from attention_serving.model.presets import PRESETS  # noqa: PLC0415 - loads PyTorch

        names = self.plan.models or (*PRESETS, CAUSAL_CROSS)
        return (Case(name, precision) for name in names for precision in PRECISIONS)

    def add(self, step: str, **fields: Any) -> None:
        """Appends a finding of a step, a JSON object on a line: a step that is cut off leaves some."""
        with self._file(step).open("a", encoding="utf-8") as file:
            file.write(json.dumps(fields) + "\n")

    def found(self, step: str) -> list[Record]:
        """All findings of a step. A line that was cut off is skipped."""
        file = self._file(step)
        lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
        return [json.loads(line) for line in lines if line.endswith("}")]

    def forget(self) -> None:
        """Removes the findings of an earlier run. Exported models stay."""
        self.work.mkdir(parents=True, exist_ok=True)
        self.models.mkdir(parents=True, exist_ok=True)
        for step in ("check", *STEPS):
            self._file(step).unlink(missing_ok=True)

    def _file(self, step: str) -> Path:
        return self.work / f"{step}.jsonl"


def build(name: str) -> Any:
    """The module in eager PyTorch, in evaluation mode and fp32, always with the same weights."""
    import torch  # noqa: PLC0415

    from attention_serving.model.attention import MultiHeadAttention  # noqa: PLC0415
    from attention_serving.model.config import AttentionConfig  # noqa: PLC0415
    from attention_serving.model.presets import build_preset  # noqa: PLC0415

    if name != CAUSAL_CROSS:
        return build_preset(name)
    config = AttentionConfig(d_query=64, num_heads=4, cross=True, causal=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return MultiHeadAttention(config).eval()

"""Which cells a run measures, how often and how long."""

from dataclasses import dataclass, field

from benchmarks.load import Window
from benchmarks.results import Cell
from benchmarks.targets import BULK_SEQUENCES, LONG, MIDDLE, MIXED, NARROW, SHORT, WIDE
from benchmarks.workload import Kind, Lengths, Model

HEADS = {64: 4, 768: 12}
FULL_MODELS = tuple(Model(kind, width, heads) for width, heads in HEADS.items() for kind in Kind)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The extent of a run.

    Attributes:
        window: Of one measurement under load.
        compute_seconds: Of one measurement in process.
        extra: Cells beside those of all lengths and loads.
        growth: Lengths at which cost is measured, one request in flight.
        shares: Rates of the open loop, as shares of the closed-loop rate with 32 in flight.
        open_cells: Cells of the open loop.
    """

    name: str
    models: tuple[Model, ...] = FULL_MODELS
    lengths: tuple[Lengths, ...] = (SHORT, MIDDLE, LONG, MIXED)
    in_flight: tuple[int, ...] = (1, 8, 32)
    extra: tuple[Cell, ...] = ()
    rounds: int = 3
    window: Window = field(default=Window(0.25, 0.05))
    compute_seconds: float = 0.12
    growth: tuple[int, ...] = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
    shares: tuple[float, ...] = (0.2, 0.5, 0.8)
    open_seconds: float = 1.0
    open_cells: tuple[Cell, ...] = (Cell(WIDE, SHORT, 32), Cell(WIDE, MIXED, 32), Cell(NARROW, SHORT, 32))

    def cells(self, model: Model) -> list[Cell]:
        """All cells of one model; of self-attention also many sequences in one request."""
        found = [Cell(model, lengths, count) for lengths in self.lengths for count in self.in_flight]
        found += [cell for cell in self.extra if cell.model == model]
        if model.kind is Kind.SELF:
            found.append(Cell(model, MIXED, BULK_SEQUENCES, BULK_SEQUENCES))
        return found

    def growth_cells(self, model: Model) -> list[Cell]:
        """Lengths at which the cost of self-attention is measured."""
        return [Cell(model, Lengths(length), 1) for length in self.growth] if model.kind is Kind.SELF else []


FULL = Plan(name="full")
QUICK = Plan(
    name="quick",
    models=(NARROW, WIDE),
    lengths=(SHORT, MIXED),
    in_flight=(1, 32),
    extra=(Cell(WIDE, MIDDLE, 8),),
    window=Window(0.2, 0.05),
    compute_seconds=0.1,
    growth=(64, 256, 1024),
    shares=(0.5, 0.8),
    open_seconds=1.0,
    open_cells=(Cell(WIDE, SHORT, 32),),
)

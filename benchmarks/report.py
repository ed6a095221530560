"""The report of a run: Markdown beside its plots."""

from collections.abc import Iterable
from pathlib import Path
from statistics import median

from benchmarks import tables
from benchmarks.memory import at_end, at_minute
from benchmarks.plots import draw
from benchmarks.results import Environment, Index, Memory, Results, load_memory, load_results
from benchmarks.summary import p50
from benchmarks.targets import graph_ratios, targets

FILE = "report.md"
MIB = 1 << 20
METHOD = Path(__file__).with_name("method.md")


def write(folder: Path) -> Path:
    """Draws the plots and writes the report of the results in a folder."""
    results, memory = load_results(folder), load_memory(folder)
    plots = draw(results, memory, folder)
    path = folder / FILE
    path.write_text(render(results, memory, plots))
    return path


def render(results: Results, memory: Memory | None, plots: Iterable[str]) -> str:
    """The report's text."""
    grid = Index(results.grid)
    cores = int(results.environment.machine["cores"].split()[0])
    sections = [
        _head(results.environment),
        "## Targets\n\n" + tables.targets_table(targets(grid, memory, cores)),
        "\n\n".join(f"![{name.removesuffix('.png')}]({name})" for name in plots),
        "## Ratios\n\n" + tables.ratios_table(grid),
        "## Many sequences in one request\n\n" + tables.bulk_table(grid),
        "## Streams\n\n" + tables.streams_table(grid),
        _graph(grid),
        _open_loop(results),
        _growth(results),
        "## Processor time of one request\n\n" + tables.processor_table(grid),
        _models(grid),
        _memory(memory),
        _failures(results),
        "## How it was measured\n\n" + METHOD.read_text().rstrip(),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def _head(environment: Environment) -> str:
    facts = {
        "date": environment.date,
        "took": f"{environment.seconds:,.0f} s",
        **environment.machine,
        **environment.settings,
        "versions": _listed(environment.versions),
        "absent peers": ", ".join(environment.absent) or "none",
    }
    return "# Benchmark\n\n" + "\n".join(f"- {name}: {value}" for name, value in facts.items())


def _listed(versions: dict[str, str]) -> str:
    return "; ".join(f"{name} {value}" for name, value in versions.items())


def _graph(grid: Index) -> str:
    ratios = graph_ratios(grid)
    if not ratios:
        return ""
    least = min(ratios, key=lambda cell: ratios[cell])
    lowest = f"least {ratios[least]:.2f} ({least.name}), median {median(ratios.values()):.2f}"
    return f"## The exported graph by eager PyTorch, in process\n\n{len(ratios)} cells: {lowest}."


def _open_loop(results: Results) -> str:
    if not results.open_loop:
        return ""
    return "## Latency at fixed rates, µs\n\n" + tables.open_loop_table(results.open_loop)


def _growth(results: Results) -> str:
    growth = Index(results.growth)
    found = []
    for width in dict.fromkeys(cell.model.width for cell in growth.cells()):
        cells = [cell for cell in growth.cells() if cell.model.width == width]
        found.append(f"d {width}, p50 in µs:\n\n" + tables.figures_table(growth, cells, p50))
    return "## Cost growth with length\n\n" + "\n\n".join(found) if found else ""


def _models(grid: Index) -> str:
    models = dict.fromkeys(cell.model for cell in grid.cells())
    return "## Grid\n\n" + "\n\n".join(tables.model_tables(grid, model) for model in models)


def _memory(memory: Memory | None) -> str:
    if memory is None:
        return "## Memory\n\nNot measured in this run."
    first, last = at_minute(memory), at_end(memory)
    values = f"{_mib(first)} after one minute, {_mib(last)} after {memory.seconds / 60:.0f} minutes"
    asked = f"{memory.load}; {memory.requests:,} requests; begun {memory.date}"
    return f"## Memory\n\nResident memory of the server: {values} ({asked})."


def _mib(size: float | None) -> str:
    return tables.NOTHING if size is None else f"{size / MIB:,.0f} MiB"


def _failures(results: Results) -> str:
    if not results.failures:
        return ""
    return "## Not measured\n\n" + "\n".join(f"- {failure}" for failure in results.failures)

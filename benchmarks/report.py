"""The report of a run in Markdown: rates and latencies, plots, targets, details, and the method."""

from collections import Counter
from pathlib import Path
from statistics import median

from benchmarks import perf_analyzer, tables
from benchmarks.peers.triton import BACKENDS_VARIABLE
from benchmarks.plots import draw
from benchmarks.results import (
    SERVICE,
    TRITON_CPP,
    Conditions,
    EnrichmentRates,
    Index,
    MemoryCurve,
    Results,
    load_enrichment,
    load_memory,
    load_results,
)
from benchmarks.summary import graph_ratios, memory_after_a_minute, memory_at_end, p50, spread
from benchmarks.targets import targets

REPORT_FILE = "report.md"
METHOD = Path(__file__).with_name("method.md")
MIB = 1 << 20
WITHOUT_CPP_BACKEND = f"""\
{TRITON_CPP} was not measured in this run. It is the strongest of the peers. No Python package contains it:
{BACKENDS_VARIABLE} names its folder, as `benchmarks/peers/install.sh` says."""


def write(measurements: Path, out: Path) -> Path:
    """Draws the plots and writes the report.

    Args:
        measurements: Folder with the JSON files of a run.
        out: Folder for the report and its plots.

    Raises:
        FileNotFoundError: There are no results in the folder.
    """
    results, memory = load_results(measurements), load_memory(measurements)
    enrichment = load_enrichment(measurements)
    plots = draw(results, memory, out)
    path = out / REPORT_FILE
    path.write_text(render(results, memory, enrichment, plots))
    return path


def render(
    results: Results, memory: MemoryCurve | None, enrichment: EnrichmentRates | None, plots: list[str]
) -> str:
    """Returns the text of the report."""
    grid = Index(results.grid)
    cores = int(results.conditions.machine["cores"].split()[0])
    sections = [
        _introduction(results.conditions),
        _rates(grid, results.conditions),
        _latencies(grid, results),
        _second_generator(Index(results.perf_analyzer)),
        "\n\n".join(f"![{name.removesuffix('.png')}]({name})" for name in plots),
        "## Targets\n\n" + tables.targets_table(targets(grid, memory, enrichment, cores)),
        "## Many sequences in one request\n\n" + tables.batch_requests_table(grid),
        "## Streams\n\n" + tables.streams_table(grid),
        _enrichment(enrichment),
        _memory(memory),
        _growth(results),
        _graph(grid),
        "## Processor time of one request\n\n" + tables.processor_table(grid),
        "## Ratios in every cell\n\n" + tables.ratios_table(grid),
        _models(grid),
        _failures(results),
        "## How it was measured\n\n" + METHOD.read_text().rstrip(),
        _conditions(results.conditions),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def _introduction(conditions: Conditions) -> str:
    machine = conditions.machine
    return (
        "# Benchmark\n\n"
        f"Measured on {conditions.date} on {machine['processor']}, {machine['cores']} cores; the load "
        "generator uses the same cores. A case names the kind of attention, the width d, the length of a "
        "sequence and the load. Figures are medians over rounds; (x 1.20) is the largest round divided by "
        "the smallest. Ratios compare tokens per second round by round; their range is in parentheses."
    )


def _rates(grid: Index, conditions: Conditions) -> str:
    note = f"\n\n{WITHOUT_CPP_BACKEND}" if TRITON_CPP in (*conditions.absent, *_unmeasured(grid)) else ""
    return "## Sequences per second, beside other servers\n\n" + tables.rates_table(grid) + note


def _unmeasured(grid: Index) -> list[str]:
    return [name for name in tables.PEERS if name not in grid.systems()]


def _latencies(grid: Index, results: Results) -> str:
    text = "## Latency\n\nOne request in flight:\n\n" + tables.single_latency_table(grid)
    if results.open_loop:
        text += "\n\nAt fixed rates (open loop), µs:\n\n" + tables.open_loop_table(results.open_loop)
    return text


def _second_generator(found: Index) -> str:
    if not found.measurements:
        return ""
    return f"## The same loads from {perf_analyzer.NAME}\n\n" + tables.generator_table(found)


def _graph(grid: Index) -> str:
    ratios = graph_ratios(grid)
    if not ratios:
        return ""
    cell = min(ratios, key=lambda one: ratios[one])
    figures = f"lowest {ratios[cell]:.2f} ({cell.name}), median {median(ratios.values()):.2f}"
    title = "## The exported graph beside eager PyTorch, in process"
    return f"{title}\n\nRatio of tokens per second in {len(ratios)} cells: {figures}."


def _growth(results: Results) -> str:
    growth = Index(results.growth)
    found = []
    for width in dict.fromkeys(cell.model.width for cell in growth.cells()):
        cells = [cell for cell in growth.cells() if cell.model.width == width]
        found.append(f"d {width}, p50 in µs:\n\n" + tables.metric_table(growth, cells, p50))
    return "## Growth of cost with length\n\n" + "\n\n".join(found) if found else ""


def _models(grid: Index) -> str:
    models = dict.fromkeys(cell.model for cell in grid.cells())
    return "## All cells\n\n" + "\n\n".join(tables.model_tables(grid, model) for model in models)


def _enrichment(rates: EnrichmentRates | None) -> str:
    if rates is None:
        return "## Enrichment\n\nNot measured in this run; `python -m benchmarks enrichment` measures it."
    ways = {"in process": rates.in_process, "through one server": rates.one_server}
    rows = [(way, tables.with_ratio(spread(own))) for way, own in ways.items()]
    said = f"{rates.rows:,} rows of 6 vectors of 64, from file to file, by turns; started {rates.date}"
    return f"## Enrichment\n\n{said}.\n\n" + tables.table(("way", "rows/s"), rows)


def _memory(memory: MemoryCurve | None) -> str:
    if memory is None:
        return "## Memory\n\nNot measured in this run; `python -m benchmarks memory` measures it."
    first, last = memory_after_a_minute(memory), memory_at_end(memory)
    values = f"{_mib(first)} after one minute, {_mib(last)} after {memory.seconds / 60:.0f} minutes"
    load = f"{memory.load}; {memory.requests:,} requests; started {memory.date}"
    return f"## Memory\n\nResident memory of the {SERVICE}: {values} ({load})."


def _mib(size: float | None) -> str:
    return tables.NOTHING if size is None else f"{size / MIB:,.0f} MiB"


def _failures(results: Results) -> str:
    if not results.failures:
        return ""
    counted = Counter(results.failures).items()
    lines = [f"- {failure}{f' ({count} times)' if count > 1 else ''}" for failure, count in counted]
    return "## Not measured\n\n" + "\n".join(lines)


def _conditions(conditions: Conditions) -> str:
    facts = {
        "date": conditions.date,
        "duration": f"{conditions.seconds:,.0f} s",
        **conditions.machine,
        **conditions.settings,
        "versions": "; ".join(f"{name} {value}" for name, value in conditions.versions.items()),
        "peers that were not installed": ", ".join(conditions.absent) or "none",
    }
    return "## Conditions\n\n" + "\n".join(f"- {name}: {value}" for name, value in facts.items())

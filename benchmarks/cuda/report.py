"""The report: what was proven and measured, and what was not."""

import platform
from collections import Counter
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from benchmarks.cuda import plots, requirements
from benchmarks.cuda.plan import STEPS, Outcome, Run
from benchmarks.cuda.records import Record
from benchmarks.cuda.steps import CHECK, findings
from benchmarks.cuda.tables import NOTHING, number, table
from benchmarks.cuda.targets import targets
from benchmarks.processes import machine, now

FILE = "report.md"


def write(run: Run, outcomes: list[Outcome], seconds: float, folder: Path) -> Path:
    """Writes report.md into a folder, with plots if every step has ended, and returns the report's path."""
    folder.mkdir(parents=True, exist_ok=True)
    found = {step: findings(run, step).read() for step in STEPS}
    with_plots = len(outcomes) == len(STEPS) and not requirements.missing(requirements.PLOTS)
    drawn = plots.draw(found, folder) if with_plots else []
    sections = [
        _introduction(run, seconds),
        "## Steps\n\n" + _steps(outcomes),
        "## Targets\n\n" + table(("target", "bound", "measured", "verdict"), targets(found)),
        _proof(found["proof"]),
        _kernels(found["kernels"]),
        _rates([*found["onnx"], *found["torch"]]),
        "\n\n".join(f"![{name.removesuffix('.png')}]({name})" for name in drawn),
        _service(found["service"]),
        _costs(found["costs"]),
        _graphs(found["graphs"]),
        _problems(found),
        _conditions(run),
    ]
    file = folder / FILE
    file.write_text("\n\n".join(section for section in sections if section) + "\n", encoding="utf-8")
    return file


def _introduction(run: Run, seconds: float) -> str:
    device = findings(run, CHECK).read()
    where = (
        device[0]["name"] if device else "the CPU: no GPU took part, and nothing here says anything about one"
    )
    return (
        f"# The service on {'CUDA' if device else 'the CPU'}\n\n"
        f"Measured on {now()} on {where}, in {seconds:.0f} s, extent {run.plan}, by "
        "`python -m benchmarks.cuda`. Reference: eager PyTorch in fp32 on the CPU. Rates are medians."
    )


def _steps(outcomes: Iterable[Outcome]) -> str:
    rows = [(one.step, f"{one.seconds:.0f}", one.problem or "done") for one in outcomes]
    return table(("step", "seconds", "result"), rows)


def _proof(records: list[Record]) -> str:
    """One row for each model and precision: the largest error of its graphs, and those that miss."""
    rows = []
    for model, precision in dict.fromkeys((one["model"], one["precision"]) for one in records):
        own = [one for one in records if (one["model"], one["precision"]) == (model, precision)]
        missed = [one["graph"] or one.get("problem", "") for one in own if not one["holds"]]
        tensors, sizes = (_kinds(own, group) for group in ("tensors", "shapes"))
        cases, error = sum(one.get("cases", 0) for one in own), max(one.get("error", 0.0) for one in own)
        verdict = "holds" if not missed else f"MISSED: {'; '.join(missed)}"
        rows.append((model, precision, cases, f"{error:.2g}", verdict, tensors, sizes))
    columns = (
        "model",
        "precision",
        "outputs compared",
        "largest error",
        "tolerance",
        "operators on the host",
        "of sizes",
    )
    return "## Proof\n\n" + table(columns, rows) if rows else ""


def _kinds(records: list[Record], group: str) -> str:
    """The kinds of operators that some graphs leave on the host, and how many there are of each."""
    nodes = [name for one in records for name in one.get("host", {}).get(group, ())]
    kinds = Counter(name.split()[0] for name in nodes)
    return ", ".join(f"{kind} {count}" for kind, count in sorted(kinds.items())) or "none"


def _kernels(records: list[Record]) -> str:
    rows = [
        (
            one["model"],
            one["precision"],
            one["graph"],
            one["length"],
            ", ".join(one["kernels"]) or one["problem"] or "not named in the log",
        )
        for one in records
    ]
    columns = ("model", "precision", "graph", "length", "kernel")
    return "## Attention kernels, from ONNX Runtime's log\n\n" + table(columns, rows) if rows else ""


def _rates(records: list[Record]) -> str:
    measured = [one for one in records if "median" in one]
    systems = list(dict.fromkeys(one["system"] for one in measured))
    cells = list(dict.fromkeys((one["precision"], one["batch"], one["length"]) for one in measured))
    values = {
        (one["precision"], one["batch"], one["length"], one["system"]): one["batch"] / one["median"]
        for one in measured
    }
    rows = [[*cell, *(number(values.get((*cell, system))) for system in systems)] for cell in cells]
    text = table(("precision", "batch", "length", *systems), rows)
    return f"## Sequences per second, in process\n\n{text}" if text else ""


def _service(records: list[Record]) -> str:
    rows = [
        (
            one["precision"],
            one["in_flight"],
            one["per_request"],
            one["length"],
            number(one["rate"]),
            number(1e6 * one["p50"]) if one["p50"] else NOTHING,
            number(one["batch"]),
            one["failures"],
            "holds" if one["holds"] else "MISSED",
        )
        for one in records
        if "rate" in one
    ]
    columns = (
        "precision",
        "requests in flight",
        "sequences each",
        "length",
        "sequences/s",
        "p50, µs",
        "sequences in a run",
        "failed",
        "first answer",
    )
    return "## Through the server, attention.v1\n\n" + table(columns, rows) if rows else ""


def _costs(records: list[Record]) -> str:
    rows = [
        (
            one["model"],
            one["precision"],
            one["graph"],
            f"{1e6 * one['call']:.1f}",
            *(f"{gain:.1f}" for gain in one["gains"].values()),
        )
        for one in records
        if "call" in one
    ]
    columns = ("model", "precision", "graph", "fixed µs of a run", "gain at length 6", "gain at length 128")
    note = "Gain: what 32 runs of one sequence are expected to take, divided by one run of 32."
    return f"## Calibration\n\n{note}\n\n" + table(columns, rows) if rows else ""


def _graphs(records: list[Record]) -> str:
    plain = {_cell(one): one["median"] for one in records if one.get("captured") is False and "median" in one}
    rows = []
    for one in records:
        if one.get("captured"):
            ratio = plain[_cell(one)] / one["median"] if "median" in one and _cell(one) in plain else None
            rows.append((*_cell(one), number(ratio), one.get("problem", "")))
    columns = ("precision", "batch", "length", "rate captured / plain", "why not")
    return "## Captured CUDA graphs\n\n" + table(columns, rows) if rows else ""


def _cell(record: Record) -> tuple[object, object, object]:
    return record["precision"], record["batch"], record["length"]


def _problems(found: dict[str, list[Record]]) -> str:
    """What could not be measured, apart from what the tables of proof and kernels state."""
    lines = []
    for step, records in found.items():
        for one in records:
            text = one.get("problem") or (
                one["result"] if str(one.get("result", "")).startswith("failed") else ""
            )
            if text and step not in ("proof", "kernels"):
                what = " ".join(
                    str(one[name]) for name in ("model", "precision", "batch", "length") if name in one
                )
                lines.append(f"- {step}, {what}: {text}" if what else f"- {step}: {text}")
    return "## Not measured\n\n" + "\n".join(lines) if lines else ""


def _conditions(run: Run) -> str:
    device = findings(run, CHECK).read()
    facts = machine() | {"python": platform.python_version()} | _versions()
    if device:
        facts |= {
            "device": f"{device[0]['name']}, {device[0]['memory_bytes'] / 2**30:.0f} GiB, compute capability "
            f"{device[0]['compute_capability']}",
            "onnxruntime built for": f"CUDA {device[0]['cuda']}",
        }
    return "## Conditions\n\n" + "\n".join(f"- {name}: {value}" for name, value in facts.items())


def _versions() -> dict[str, str]:
    found = {}
    for name in ("onnxruntime", "onnxruntime-gpu", "torch", "onnx", "numpy", "grpcio"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found

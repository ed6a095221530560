"""The report: what was proven and measured, and what was not. Imports neither PyTorch nor ONNX Runtime."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks.cuda.plan import STEPS, Record, Run
from benchmarks.markdown import table, text
from benchmarks.processes import library_versions, machine, now

ONNX, TORCH = "ONNX Runtime", "eager PyTorch"


def write(run: Run, problems: Mapping[str, str], folder: Path) -> Path:
    """Writes report.md into a folder, and returns its path.

    Args:
        run: What was run.
        problems: Why a step did not end well, empty if it did; by step.
        folder: The folder; it is made if it does not exist.
    """
    found = {step: run.found(step) for step in STEPS}
    device = run.found("check")
    where = (
        device[0]["name"] if device else "the CPU: no GPU took part, and nothing here says anything about one"
    )
    facts = machine() | library_versions()
    sections = {
        "Steps": _records([{"step": step, "result": why or "done"} for step, why in problems.items()]),
        "Proof": _records(proven(found["proof"])),
        "Sequences per second, in process": _records(_rates([*found["onnx"], *found["torch"]])),
        "Through the server, attention.v1": _records(_without_problems(found["service"])),
        "Not measured": "\n".join(_problems(found)),
        "Conditions": "\n".join(f"- {k}: {v}" for k, v in (facts | (device[0] if device else {})).items()),
    }  # fmt: skip
    head = (
        f"# The service on {'CUDA' if device else 'the CPU'}\n\nMeasured on {now()} on {where}, "
        f"{'quick' if run.quick else 'full'} extent, by `python -m benchmarks.cuda`. "
        "Reference: eager PyTorch in fp32 on the CPU. Rates are medians.\n"
    )
    body = "".join(f"\n## {title}\n\n{content}\n" for title, content in sections.items() if content)
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "report.md"
    file.write_text(head + body, encoding="utf-8")
    return file


def _records(records: Sequence[Record]) -> str:
    """Records as a table, the keys as columns; an empty string if there are none."""
    columns = list(dict.fromkeys(name for record in records for name in record))
    rows = [[text(record.get(name)) for name in columns] for record in records]
    return table(columns, rows) if rows else ""


def proven(records: list[Record]) -> list[Record]:
    """One row for each model and precision: the largest error of its graphs, and those that miss."""
    rows = []
    for model, precision in dict.fromkeys((one["module"], one["precision"]) for one in records):
        own = [one for one in records if (one["module"], one["precision"]) == (model, precision)]
        missed = [one["graph"] or one.get("problem", "") for one in own if not one["holds"]]
        kinds = [name.split()[0] for one in own for name in one.get("host", ())]
        rows.append(
            {
                "model": model,
                "precision": precision,
                "outputs compared": sum(one.get("cases", 0) for one in own),
                "largest error": max(one.get("error", 0.0) for one in own),
                "tolerance": f"MISSED: {'; '.join(missed)}" if missed else "holds",
                "operators on the host": Counter(kinds),
            }
        )
    return rows


def _rates(records: list[Record]) -> list[Record]:
    rows: dict[tuple[str, int, int], Record] = {}
    for one in records:
        if "median" in one:
            cell = one["precision"], one["batch"], one["length"]
            row = rows.setdefault(cell, dict(zip(("precision", "batch", "length"), cell, strict=True)))
            row[one["system"]] = one["batch"] / one["median"]
    return list(rows.values())


def _without_problems(records: list[Record]) -> list[Record]:
    return [{k: v for k, v in one.items() if k != "problem"} for one in records if not one.get("problem")]


def _problems(found: dict[str, list[Record]]) -> Iterator[str]:
    """What could not be measured, apart from what the table of proof states."""
    for step, records in found.items():
        for one in records:
            if one.get("problem") and step != "proof":
                names = ("model", "module", "precision", "graph", "batch", "length")
                what = " ".join(str(one[name]) for name in names if name in one)
                yield f"- {step}, {what}: {one['problem']}"

"""The kit: its steps, each in a process of its own with a limit of its own, and their report."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from itertools import groupby
from pathlib import Path

from attention_serving.server.engine.run import cuda as driver
from attention_serving.server.engine.run.provider import Provider
from benchmarks.cuda.answers import SETUPS, SHIPPED, verdict
from benchmarks.cuda.rates import SERVINGS
from benchmarks.cuda.settings import BASE_ENCODER, SMALL_ENCODER, Row, Settings
from benchmarks.markdown import table, text
from benchmarks.processes import environment
from scripts.local_server import ROOT

PROGRAM = ("artifact", "benchmarks", "export", "model", "server")
# Sequences of 128 x 768 in fp16 per second over gRPC, 256 in a request, on an H100 on 2026-11-26.
EARLIER_RATE = 2978
GOAL_TOKENS, SLOWER = 128, 10
NOT_MEASURED = "not measured"
SET_UPS, SERVED = "Answers by set-up", "Answers of a server under everything at once"
PROOF, ENCODERS, ATTENTION, SERVER = "Proof", "Encoders in process", "Attention in process", "Server"


@dataclass(frozen=True)
class Step:
    """A generator of rows, in a module of this package.

    Attributes:
        section: Title in the report; steps of one section share a table.
        seconds: Time after which it is stopped; rows until then are kept.
        arguments: Arguments of the function after the settings.
        environment: Variables of its process.
    """

    section: str
    module: str
    function: str
    seconds: int
    arguments: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


# Together below ten minutes.
STEPS = {
    "device": Step("Device and copies", "rates", "describe_device", 20),
    **{
        f"answers-{name}".replace(" ", "-"): Step(
            SET_UPS, "answers", "compare_set_up", 14, (name,), setup.environment
        )
        for name, setup in SETUPS.items()
    },
    "kernels": Step("Kernels", "proof", "compare_kernels", 25),
    "proof": Step(PROOF, "proof", "prove_all", 75),
    "encoders-small": Step(ENCODERS, "rates", "time_encoder", 50, (SMALL_ENCODER,)),
    "encoders-base": Step(ENCODERS, "rates", "time_encoder", 60, (BASE_ENCODER,)),
    "encoders-compiled": Step("Encoders compiled by PyTorch", "rates", "time_compiled", 40),
    "attention": Step(ATTENTION, "rates", "time_attention", 35),
    **{
        f"server-{name}".replace(",", "").replace(" ", "-"): Step(
            SERVER, "rates", "time_server", 28, (name,), setup.environment
        )
        for name, setup in SERVINGS.items()
    },
    "served-answers": Step(SERVED, "answers", "compare_served", 50),
}


@dataclass(frozen=True)
class Result:
    """What a step found.

    Attributes:
        key: Digest of the program, the versions, the device and the fixed answers.
        problem: Why the step did not end; empty if it did.
    """

    key: str
    rows: Sequence[Row]
    seconds: float = 0.0
    problem: str = ""


def run(
    settings: Settings,
    results: dict[str, Result],
    report_progress: Callable[[str], None],
    *,
    only: Collection[str] = (),
    again: Collection[str] = (),
) -> None:
    """Runs the steps whose results are not there.

    Args:
        settings: Where and on what they run.
        results: Filled during the run, so that an interrupted run keeps what it found.
        report_progress: Called with each step and how it ended.
        only: The steps that may run; all if empty.
        again: Steps that run although their results are there.
    """
    folder, key = settings.cache / "results", _key(settings)
    folder.mkdir(parents=True, exist_ok=True)
    for name, step in STEPS.items():
        file = folder / f"{name}.json"
        result = Result(**json.loads(file.read_text())) if file.exists() else None
        if result and result.key == key and not result.problem and name not in again:
            results[name] = result
            report_progress(f"{name}: there")
        elif not only or name in {*only, *again}:
            report_progress(f"{name}: at most {_limit(settings, step)} s")
            result = results[name] = _run_step(settings, name, step, key, folder / f"{name}.lines")
            file.write_text(json.dumps(asdict(result), indent=1))
            report_progress(f"{name}: {result.problem or 'done'}, {result.seconds:.0f} s")


def _limit(settings: Settings, step: Step) -> int:
    """Seconds. Times on the CPU tell nothing, and other programs may use its cores."""
    return step.seconds * (SLOWER if settings.device is Provider.CPU else 1)


def _run_step(settings: Settings, name: str, step: Step, key: str, lines: Path) -> Result:
    """Runs a step in a process of its own, with all processes that it starts in one group."""
    arguments = [name, lines, settings.cache, settings.device, int(settings.quick)]
    command = [sys.executable, "-m", "benchmarks.cuda", *map(str, arguments)]
    lines.unlink(missing_ok=True)
    limit, log, started, problem = _limit(settings, step), lines.with_suffix(".log"), time.monotonic(), ""
    with log.open("wb") as output:
        process = subprocess.Popen(  # noqa: S603 - a program of this repository
            command,
            cwd=ROOT,
            env={**os.environ, **step.environment},
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        try:
            if status := process.wait(limit):
                tail = log.read_text(errors="replace").strip().splitlines()[-1:]
                problem = f"ended with status {status}: {' '.join(tail)[:300]}"
        except subprocess.TimeoutExpired:
            problem = f"stopped at its limit of {limit} s"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    rows = [json.loads(line) for line in lines.read_text().splitlines()] if lines.exists() else []
    return Result(key, rows, time.monotonic() - started, problem)


def _key(settings: Settings) -> str:
    digest = sha256(json.dumps([device_name(settings), settings.quick, versions()]).encode())
    files = [file for folder in PROGRAM for file in (ROOT / folder).rglob("*.py")]
    for file in sorted([*files, *(settings.cache / "fixed").iterdir()]):
        digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()


def device_name(settings: Settings) -> str:
    """The name of the device that runs go to.

    Raises:
        ProviderError: CUDA cannot be used.
    """
    return "CPU" if settings.device is Provider.CPU else driver.find_device().name


def versions() -> dict[str, str]:
    """The machine and the versions of the libraries, without the date."""
    return {name: value for name, value in environment().items() if name != "date"}


def missed(results: Mapping[str, Result]) -> list[str]:
    """The answers of what is shipped that are wrong, and the tolerances that are missed."""
    rows = [(name, row) for name, result in results.items() for row in result.rows]
    return [
        f"{name}: {row.get('tolerance', '')} {row.get('first', '')}"
        for name, row in rows
        if "MISSED" in str(row.get("tolerance"))
        or (row.get("set-up", SHIPPED) == SHIPPED and (row.get("wrong") or row.get("failed")))
    ]


def write_report(settings: Settings, results: Mapping[str, Result]) -> str:
    """The report in Markdown: goals, then a table for each section, then what did not end."""
    sections = {"Goals": table(("goal", "result"), goals(settings, results))}
    for title, names in groupby(results, key=lambda name: STEPS[name].section):
        rows = [row for name in names for row in results[name].rows]
        columns = list(dict.fromkeys(key for row in rows for key in row))
        cells = [[text(row.get(column)) for column in columns] for row in rows]
        sections[title] = table(columns, cells) if rows else NOT_MEASURED
        if title == SET_UPS:
            sections[title] += f"\n\nVerdict: {verdict(rows)}."
    problems = [f"- {name}: {result.problem}" for name, result in results.items() if result.problem]
    problems += [f"- {name}: did not run" for name in STEPS if name not in results]
    sections["Steps that did not end"] = "\n".join(problems) or "None."
    conditions = {**environment(), "device": device_name(settings), "extent": settings.pick("full", "quick")}
    conditions["seconds of all steps"] = text(sum(result.seconds for result in results.values()))
    sections["Conditions"] = "\n".join(f"- {name}: {value}" for name, value in conditions.items())
    return "# On a GPU\n" + "".join(f"\n## {title}\n\n{body}\n" for title, body in sections.items())


def _rows(results: Mapping[str, Result], section: str) -> list[Row]:
    return [row for name, result in results.items() if STEPS[name].section == section for row in result.rows]


def goals(settings: Settings, results: Mapping[str, Result]) -> list[tuple[str, str]]:
    """Each goal, and whether it was reached. Rates on the CPU and of small sizes do not count."""
    answers = [row for row in _rows(results, SET_UPS) if row["set-up"] == SHIPPED] + _rows(results, SERVED)
    is_whole = len(answers) == 2  # noqa: PLR2004 - the set-up and the server
    wrong = sum(row["wrong"] + row["failed"] for row in answers)
    counted = f"{wrong} wrong of {sum(row['runs'] for row in answers):,}"
    verdicts = [("all answers right", _judge(wrong == 0 if is_whole else None, counted))]
    if settings.quick or settings.device is Provider.CPU:
        results = {}
    encoders, served = _rows(results, ENCODERS), _rows(results, SERVER)
    in_process = {
        (row["encoder"].split(",")[0], row["texts"]): row for row in encoders if row["tokens"] == GOAL_TOKENS
    }
    for name, least in ((SMALL_ENCODER, 1.2), (BASE_ENCODER, 1.0)):
        ratio = min((row["ratio"] for (key, _), row in in_process.items() if key == name), default=None)
        goal = f"{name} at 128 tokens: at least {least} of sentence-transformers"
        verdicts.append((goal, _compare(ratio, least)))
    rates = {row["request"]: row for row in served if row["set-up"] == "1 worker"}
    shares = [
        rates[f"{size} texts"]["sequences/s"] / in_process[SMALL_ENCODER, size]["texts/s"]
        for size in (32, 256)
        if f"{size} texts" in rates and (SMALL_ENCODER, size) in in_process
    ]
    verdicts.append(
        (
            "service: at least 0.8 of in process for 32 texts and more",
            _compare(min(shares, default=None), 0.8),
        )
    )
    wire = rates.get("256 x 128 x 768", {})
    verdicts.append(
        ("256 x 128 x 768 in fp16: at least 0.8 of a bare echo", _compare(wire.get("of echo"), 0.8))
    )
    ratio = wire["sequences/s"] / EARLIER_RATE if wire else None
    verdicts.append((f"and at least 2 x the earlier {EARLIER_RATE:,}/s", _compare(ratio, 2)))
    return verdicts


def _compare(value: float | None, least: float) -> str:
    return _judge(None if value is None else value >= least, text(value))


def _judge(reached: bool | None, figure: str) -> str:  # noqa: FBT001 - a verdict
    return NOT_MEASURED if reached is None else f"{'reached' if reached else 'missed'} ({figure})"

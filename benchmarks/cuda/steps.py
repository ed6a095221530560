"""Runs the steps, each in a process of its own and for a bounded time. What a failed step had found stays."""

import json
import signal
import sys
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from os import environ
from pathlib import Path
from subprocess import TimeoutExpired

from benchmarks.cuda import requirements
from benchmarks.cuda.plan import STEPS, USUAL_SECONDS, Outcome, Run
from benchmarks.cuda.records import Records
from benchmarks.processes import running

ROOT = Path(__file__).resolve().parents[2]
RUN_FILE = "run.json"
CHECK = "check"
CHECK_SECONDS = 120
# The module and function of each step.
FUNCTIONS = {
    CHECK: ("benchmarks.cuda.check", "check"),
    "export": ("benchmarks.cuda.exports", "export_all"),
    "proof": ("benchmarks.cuda.proof", "prove"),
    "kernels": ("benchmarks.cuda.kernels", "look_up"),
    "costs": ("benchmarks.cuda.costs", "calibrate"),
    "onnx": ("benchmarks.cuda.rates", "measure_onnx"),
    "torch": ("benchmarks.cuda.rates", "measure_torch"),
    "service": ("benchmarks.cuda.service", "measure"),
    "graphs": ("benchmarks.cuda.graphs", "measure"),
}


def prepare(run: Run) -> None:
    """Makes the folders, and removes the findings of an earlier run. Exported models stay."""
    run.work.mkdir(parents=True, exist_ok=True)
    run.models.mkdir(parents=True, exist_ok=True)
    for step in FUNCTIONS:
        findings(run, step).path.unlink(missing_ok=True)
    (run.work / RUN_FILE).write_text(json.dumps(run.as_json()))


def findings(run: Run, step: str) -> Records:
    """The findings of a step."""
    return Records(run.work / f"{step}.jsonl")


def run_all(run: Run, seconds: float) -> Iterator[Outcome]:
    """Runs every step. A step that would begin after the time is over is not run.

    Args:
        run: What to measure.
        seconds: For all steps together. With more than the usual time, each step has more.
    """
    until, scale = time.monotonic() + seconds, max(1.0, seconds / USUAL_SECONDS)
    for step, own_seconds in STEPS.items():
        yield run_step(run, step, min(scale * own_seconds, until - time.monotonic()))


def run_step(run: Run, step: str, seconds: float) -> Outcome:
    """Runs one step for at most that time."""
    if absent := requirements.missing(requirements.OF_STEP.get(step, {})):
        return Outcome(step, 0.0, requirements.sentence(absent))
    if seconds <= 0:
        return Outcome(step, 0.0, "not run: the time was over")
    log = run.work / f"{step}.step.log"
    command = [sys.executable, "-m", "benchmarks.cuda", "--step", step, "--work", str(run.work)]
    path = f"{ROOT}{':' + environ['PYTHONPATH'] if environ.get('PYTHONPATH') else ''}"
    started = time.monotonic()
    with running(command, log, {**environ, "PYTHONPATH": path}, ROOT) as process:
        try:
            status = process.wait(seconds)
        except TimeoutExpired:
            return Outcome(step, seconds, f"not ended after {seconds:.0f} s; what it had found is reported")
    problem = f"failed: {_last_line(log)}" if status else ""
    return Outcome(step, time.monotonic() - started, problem)


def be_step(step: str, work: Path) -> int:
    """Body of the process of a step; returns its exit status."""
    # Leaving by an exception stops the processes that the step has started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    run = Run.from_json(json.loads((work / RUN_FILE).read_text()))
    module, name = FUNCTIONS[step]
    function: Callable[[Run, Records], None] = getattr(import_module(module), name)
    function(run, findings(run, step))
    return 0


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1][:500] if lines else "no output"

"""Proves and measures the service on one NVIDIA GPU, and writes a report. Takes up to ten minutes.

It exports every preset in fp32, fp16 and bf16, compares each graph on the device with eager PyTorch on the
CPU over the parity grid (masks, rows that may attend to nothing, causal attention with queries and keys of
different lengths, positions), and measures rates in process beside eager PyTorch's scaled dot-product
attention, and through the server.

Needs an NVIDIA driver, a PyTorch with CUDA, and the extras `gpu` and `export` of this repository. The
libraries of CUDA and cuDNN may be those that PyTorch installs. The wheels onnxruntime and onnxruntime-gpu
contain the same module: install the second in place of the first. A step whose packages are missing fails,
and the report says so. With --models, models that were exported elsewhere are used.
"""

import argparse
import signal
import sys
import time
from collections.abc import Callable
from importlib import import_module
from os import environ
from pathlib import Path
from subprocess import TimeoutExpired

from benchmarks.cuda import report
from benchmarks.cuda.plan import STEPS, USUAL_SECONDS, Run
from benchmarks.processes import running

ROOT = Path(__file__).resolve().parents[2]
CHECK_SECONDS = 120
RESULTS = Path("benchmarks/results/cuda")
# The module of each step; its functions have the names of the steps.
MODULES = dict.fromkeys(("check", "export", "proof"), "proof")
MODULES |= dict.fromkeys(("onnx", "torch", "service"), "rates")


def main() -> int:
    """Runs the command; returns its exit status: 0 if every step ended well and everything holds."""
    given = _parser().parse_args()
    work = given.work.resolve()
    run = Run(given.device, given.quick, work, given.models.resolve() if given.models else work / "models")
    if given.step:
        # Leaving by an exception stops the processes that the step has started.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        module = import_module(f"benchmarks.cuda.{MODULES[given.step]}")
        step_function: Callable[[Run], None] = getattr(module, given.step)
        step_function(run)
        return 0
    run.forget()
    if problem := _run_step(run, "check", CHECK_SECONDS):
        print(f"error: {problem.removeprefix('failed: ')}", file=sys.stderr)  # noqa: T201
        return 1
    # Only a full run on a GPU replaces the committed report unless asked to.
    out = given.out or (RESULTS if run.device == "cuda" and not run.quick else work / "report")
    started, scale = time.monotonic(), max(1.0, 60 * given.minutes / USUAL_SECONDS)
    problems: dict[str, str] = {}
    for step, seconds in STEPS.items():
        left = 60 * given.minutes - (time.monotonic() - started)
        problems[step] = _run_step(run, step, min(scale * seconds, left))
        print(f"{step}: {problems[step] or 'done'}", flush=True)  # noqa: T201
        # After each step, because a limit of the machine may end the program.
        file = report.write(run, problems, out)
    print(f"wrote {file}")  # noqa: T201
    proven = all(record["holds"] for record in run.found("proof"))
    # The host has no kernels for bf16.
    return 0 if not any(problems.values()) and (proven or run.device == "cpu") else 1


def _run_step(run: Run, step: str, seconds: float) -> str:
    """Runs one step in a process of its own for at most that time; returns why it did not end well."""
    if seconds <= 0:
        return "not run: the time was over"
    log = run.work / f"{step}.step.log"
    command = [sys.executable, "-m", "benchmarks.cuda", "--step", step, "--device", run.device]
    command += ["--work", str(run.work), "--models", str(run.models), *(["--quick"] if run.quick else [])]
    path = f"{ROOT}{':' + environ['PYTHONPATH'] if environ.get('PYTHONPATH') else ''}"
    with running(command, log, {**environ, "PYTHONPATH": path}, ROOT) as process:
        try:
            status = process.wait(seconds)
        except TimeoutExpired:
            return f"not ended after {seconds:.0f} s; what it had found is reported"
    lines = log.read_text(errors="replace").strip().splitlines() or ["no output"]
    return f"failed: {lines[-1][:500]}" if status else ""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.cuda",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu tries the program itself"
    )
    parser.add_argument("--quick", action="store_true", help="few models and sizes, in a minute or two")
    parser.add_argument("--models", type=Path, help="model repository; missing models are exported into it")
    parser.add_argument("--out", type=Path, help=f"folder of report.md (default: {RESULTS})")
    parser.add_argument(
        "--work", type=Path, default=Path("build/cuda"), help="folder of findings, logs and exported models"
    )
    parser.add_argument("--minutes", type=float, default=USUAL_SECONDS / 60, help="time for all steps")
    parser.add_argument("--step", choices=tuple(MODULES), help=argparse.SUPPRESS)
    return parser


# Worker processes import this file again; they must not run it.
if __name__ == "__main__":
    sys.exit(main())

"""Proves and measures the service on one NVIDIA GPU, and writes a report with plots. Takes up to ten minutes.

It exports every preset in fp32, fp16 and bf16, compares each graph on the device with eager PyTorch on the
CPU over the parity grid (masks, rows that may attend to nothing, causal attention with queries and keys of
different lengths, positions), looks up the attention kernels in ONNX Runtime's log, calibrates, and measures
rates in process beside eager PyTorch's scaled dot-product attention, through the server, and with captured
CUDA graphs.

Needs an NVIDIA driver, a PyTorch with CUDA, and onnxruntime-gpu (not onnxruntime: both are the module
`onnxruntime`). The libraries of CUDA and cuDNN may be those that PyTorch installs. On a machine without a
network, carry the wheel and install it:

  pip uninstall --yes onnxruntime
  pip install --no-deps onnxruntime_gpu-*.whl

Further packages: {packages}.
A step whose packages are missing is left out, and the report says so. With --models, models that were
exported elsewhere are used, and the step that exports has nothing to do.
"""

import argparse
import sys
import time
from pathlib import Path

from benchmarks.cuda import report, requirements, steps
from benchmarks.cuda.plan import FULL, QUICK, USUAL_SECONDS, Outcome, Run

WORK, RESULTS = Path("build/cuda"), Path("benchmarks/results/cuda")
MINUTES = USUAL_SECONDS / 60


def main(arguments: list[str] | None = None) -> int:
    """Runs the command; returns its exit status: 0 if every step ended well and everything holds."""
    given = _parser().parse_args(arguments)
    if given.step:
        return steps.be_step(given.step, given.work)
    if absent := requirements.missing(requirements.BASE):
        return _refuse(requirements.sentence(absent))
    plan = QUICK if given.quick else FULL
    work = given.work.resolve()
    models = given.models.resolve() if given.models else work / "models"
    run = Run(given.device, plan.name, work, models)
    steps.prepare(run)
    checked = steps.run_step(run, steps.CHECK, steps.CHECK_SECONDS)
    if checked.problem:
        return _refuse(checked.problem.removeprefix("failed: "))
    started = time.monotonic()
    outcomes: list[Outcome] = []
    for outcome in steps.run_all(run, given.minutes * 60):
        outcomes.append(outcome)
        print(f"{outcome.step}: {outcome.problem or 'done'} ({outcome.seconds:.0f} s)", flush=True)  # noqa: T201
        # After each step, because a limit of the machine may end the program.
        file = report.write(run, outcomes, time.monotonic() - started, _out(given))
    print(f"wrote {file}")  # noqa: T201
    return _status(run, outcomes)


def _status(run: Run, outcomes: list[Outcome]) -> int:
    proven = all(record["holds"] for record in steps.findings(run, "proof").read())
    ended_well = not any(outcome.problem for outcome in outcomes)
    # The host has no kernels for bf16.
    return 0 if ended_well and (proven or run.device == "cpu") else 1


def _out(given: argparse.Namespace) -> Path:
    """The folder of the report. Only a full run on a GPU replaces the committed one unless asked to."""
    if given.out:
        return Path(given.out)
    return RESULTS if given.device == "cuda" and not given.quick else given.work / "report"


def _refuse(reason: str) -> int:
    print(f"error: {reason}", file=sys.stderr)  # noqa: T201
    return 1


def _parser() -> argparse.ArgumentParser:
    every = requirements.BASE | requirements.SERVER | requirements.EXPORT | requirements.PLOTS
    packages = ", ".join(sorted(set(every.values())))
    parser = argparse.ArgumentParser(
        "python -m benchmarks.cuda",
        description=(__doc__ or "").format(packages=packages),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu tries the program itself"
    )
    parser.add_argument("--quick", action="store_true", help="few models and sizes, in a minute or two")
    parser.add_argument("--models", type=Path, help="model repository; what it lacks is exported into it")
    parser.add_argument("--out", type=Path, help=f"folder of report.md and the plots (default: {RESULTS})")
    parser.add_argument(
        "--work", type=Path, default=WORK, help="folder of findings, logs and exported models"
    )
    minutes = f"time for all steps (default: {MINUTES:g})"
    parser.add_argument("--minutes", type=float, default=MINUTES, help=minutes)
    parser.add_argument("--step", choices=tuple(steps.FUNCTIONS), help=argparse.SUPPRESS)
    return parser

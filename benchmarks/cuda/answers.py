"""Compares answers with fixed ones under load: by set-up of the runtime, and through a server.

The set-ups differ from "four threads" in one thing each, so that the one that ends wrong values names their
cause.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from attention_client import AttentionClient

from attention_serving.artifact.golden import Arrays, GoldenCase
from attention_serving.artifact.manifest import KEY_LENGTHS, GraphKind
from attention_serving.artifact.runtime import unsafe_optimizers
from attention_serving.artifact.tolerance import Tolerance
from attention_serving.export.precision import Precision
from attention_serving.server.engine.run import cuda
from attention_serving.server.engine.run import session as sessions
from attention_serving.server.engine.run.provider import Provider
from benchmarks.cuda.rates import serve
from benchmarks.cuda.settings import NOT_HERE, SMALL_ENCODER, Row, Settings

MOST_EXAMPLES = 3
THREADS, CALLERS = 4, 16
VECTOR = 2  # axes of an output with a vector for each sequence
ENV_ALLOCATORS = "session.use_env_allocators"
Run = Callable[[Arrays], Arrays]


@dataclass(frozen=True, kw_only=True)
class SetUp:
    """How the runtime is used.

    Attributes:
        cause: What caused the wrong values of "four threads" if this set-up has none.
        shipped: Whether graphs are run as the server does it.
        overlaps: Whether inputs are copied while another run computes.
        environment: Variables of the process.
    """

    cause: str = ""
    threads: int = THREADS
    own_arena: bool = False
    own_sessions: bool = False
    one_stream: bool = False
    shipped: bool = False
    overlaps: bool = False
    needs_cuda: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)


ALONE, PLAIN, SHIPPED = "one thread", "four threads", "as shipped"
BLOCKING, WITHOUT_FLASH = {"CUDA_LAUNCH_BLOCKING": "1"}, {"ORT_DISABLE_FLASH_ATTENTION": "1"}
SETUPS = {
    ALONE: SetUp(threads=1),
    PLAIN: SetUp(),
    "own arenas": SetUp(own_arena=True, cause="the shared arena"),
    "own sessions": SetUp(own_sessions=True, cause="runs of one session at a time"),
    "one stream": SetUp(one_stream=True, needs_cuda=True, cause="several streams"),
    "blocking": SetUp(environment=BLOCKING, needs_cuda=True, cause="launches that do not wait"),
    "flash off": SetUp(environment=WITHOUT_FLASH, needs_cuda=True, cause="flash attention"),
    "copies beside runs": SetUp(shipped=True, overlaps=True, needs_cuda=True),
    SHIPPED: SetUp(shipped=True, cause="runs at a time, which the lock prevents"),
}


@dataclass(frozen=True)
class Question:
    """A call, of which each answer is compared: it takes the number of its thread."""

    label: str
    call: Callable[[int], Arrays]
    expected: Arrays
    tolerance: Tolerance


def ask(questions: Sequence[Question], threads: int, runs: float, seconds: float) -> Row:
    """Asks random questions in threads until there were so many or the time is over; counts wrong answers.

    An answer is wrong if one of its outputs misses the tolerance. The first wrong ones are kept.
    """
    wrong, failed = list[str](), list[str]()
    numbers, started = count(), time.monotonic()

    def work(thread: int) -> int:
        rng, answers = np.random.default_rng(thread), 0
        while next(numbers) < runs and time.monotonic() < started + seconds:
            question = questions[int(rng.integers(len(questions)))]
            where, answers = f"thread {thread}, {question.label}", answers + 1
            try:
                outputs = question.call(thread)
            except Exception as error:  # ONNX Runtime and the client raise many types
                failed.append(f"{where}: {str(error)[:200]}")
                continue
            problems = [
                f"{where}, {name} {difference(outputs[name], values)}"
                for name, values in question.expected.items()
                if not question.tolerance.holds(outputs[name], values)
            ]
            wrong.extend(problems[:1])
        return answers

    with ThreadPoolExecutor(threads) as pool:
        total = sum(pool.map(work, range(threads)))
    rate = total / (time.monotonic() - started)
    first = "; ".join([*wrong[:MOST_EXAMPLES], *failed[:MOST_EXAMPLES]])
    return {"runs": total, "wrong": len(wrong), "failed": len(failed), "runs/s": rate, "first": first}


def difference(values: Any, expected: Any) -> str:
    """Where two arrays differ most, and both values there."""
    if values.shape != expected.shape:
        return f"has shape {values.shape}, not {expected.shape}"
    distances = np.nan_to_num(np.abs(values.astype(np.float64) - expected), nan=np.inf)
    at = np.unravel_index(distances.argmax(), distances.shape)
    return f"{list(values.shape)} at {list(map(int, at))}: {values[at]:.6g}, not {expected[at]:.6g}"


def compare_set_up(settings: Settings, name: str) -> Iterator[Row]:
    """Runs all fixed cases of small graphs in the threads of a set-up, and compares every answer."""
    setup = SETUPS[name]
    if setup.needs_cuda and settings.device is Provider.CPU:
        yield {"set-up": name, "runs": NOT_HERE}
        return
    cases = [(*model, *parts) for model in settings.tiny for parts in settings.fixed_cases(*model)]
    files = dict.fromkeys(file for *_, file, _ in cases)
    shared = open_runs(settings, setup, files)
    opened = [
        open_runs(settings, setup, files) if setup.own_sessions else shared for _ in range(setup.threads)
    ]

    def call(file: Path, inputs: Arrays, thread: int) -> Arrays:
        return opened[thread][file](inputs)

    questions = [
        Question(
            f"{model}-{precision} {case.graph}", partial(call, file, case.inputs), case.outputs, m.tolerance
        )
        for model, precision, m, file, case in cases
    ]
    yield {"set-up": name, **ask(questions, setup.threads, settings.pick(12_500, 400), settings.pick(10, 5))}


def open_runs(settings: Settings, setup: SetUp, files: Iterable[Path]) -> dict[Path, Run]:
    """By file, what runs its graph."""
    device = settings.session_device
    if setup.shipped:
        device = replace(device, overlaps=setup.overlaps)
        return {file: partial(_run_session, sessions.Session(file, device)) for file in files}
    if device.provider is Provider.CUDA:
        cuda.find_device()  # loads its libraries
    runtime, options = device.provider.runtime, onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.enable_mem_pattern = 1, False
    for key, value in sessions._entries(device, prepack_weights=True).items():
        options.add_session_config_entry(key, "0" if setup.own_arena and key == ENV_ALLOCATORS else value)
    for provider in {Provider.CPU, device.provider}:
        sessions._register_arena(provider, 0)
    stream = {"user_compute_stream": str(_stream().cuda_stream)} if setup.one_stream else {}
    providers = [(runtime.name, {**runtime.options, **stream})]
    return {file: _open(file, options, providers) for file in files}


def _run_session(session: sessions.Session, inputs: Arrays) -> Arrays:
    return session.run({**inputs})


def _open(file: Path, options: Any, providers: Sequence[Any]) -> Run:
    session = onnxruntime.InferenceSession(
        file, options, providers=providers, enable_fallback=0, disabled_optimizers=unsafe_optimizers(file)
    )
    if session.get_providers()[0] != providers[0][0]:
        raise RuntimeError(f"{file} runs on {session.get_providers()[0]}")
    names = [output.name for output in session.get_outputs()]
    return lambda inputs: dict(zip(names, session.run(names, inputs), strict=True))


@cache
def _stream() -> Any:
    """A stream, which lives as long as the process."""
    import torch  # noqa: PLC0415 - takes seconds

    stream: Any = torch.cuda.Stream
    return stream()


def verdict(rows: Sequence[Row]) -> str:
    """What the set-ups show together about the cause of wrong values."""
    wrong = {row["set-up"]: row.get("wrong") for row in rows}
    if wrong.get(PLAIN) is None:
        return "unknown: four threads without a lock did not run"
    if wrong.get(ALONE):
        return "one thread has wrong values too: neither a lock nor arenas help"
    if not wrong[PLAIN]:
        return "nothing to decide: four threads without a lock had no wrong value"
    causes = [SETUPS[name].cause for name, number in wrong.items() if number == 0 and SETUPS[name].cause]
    return (
        f"wrong values end without {'; or without '.join(causes)}" if causes else "nothing ends wrong values"
    )


def compare_served(settings: Settings) -> Iterator[Row]:
    """Asks a server everything at once, and compares every answer."""
    large = [(SMALL_ENCODER, Precision.FP16), (settings.wide, Precision.FP16)]
    models = [*settings.tiny, *settings.pick(large, [])]
    with serve(settings, models) as server, AttentionClient(server.target) as client:
        questions = [
            question
            for name, precision in models
            for manifest, _, case in settings.fixed_cases(name, precision)
            if (question := served_question(client, f"{name}-{precision}", manifest.tolerance, case))
        ]
        callers = settings.pick(CALLERS, THREADS)
        yield {"models": len(models), **ask(questions, callers, float("inf"), settings.pick(30, 3))}


def served_question(
    client: AttentionClient, model: str, tolerance: Tolerance, case: GoldenCase
) -> Question | None:
    """A call of a server for a fixed case; None if no call has its inputs.

    Sequences with lengths are sent without padding, and those without rows are left out.
    """
    inputs: dict[str, Any] = dict(case.inputs)
    lengths, outputs = inputs.pop(KEY_LENGTHS, None), dict(case.outputs)
    if lengths is None and case.graph not in (GraphKind.PLAIN, GraphKind.MASK, GraphKind.WEIGHTS):
        return None
    if lengths is not None:
        if case.graph is not GraphKind.LENGTHS or len(inputs) > 1 or not lengths.any():
            return None
        pairs = [(at, length) for at, length in enumerate(lengths) if length]
        inputs = {name: [array[at, :length] for at, length in pairs] for name, array in inputs.items()}
        for name, array in outputs.items():
            rows = [array[at, :length] if array.ndim > VECTOR else array[at : at + 1] for at, length in pairs]
            outputs[name] = np.concatenate(rows)

    def call(_thread: int) -> Arrays:
        answer = client.infer(model, inputs, outputs=list(outputs)).outputs
        return {
            name: np.concatenate(list(answer[name])).reshape(values.shape) for name, values in outputs.items()
        }

    return Question(f"{model} {case.graph}", call, outputs, tolerance)

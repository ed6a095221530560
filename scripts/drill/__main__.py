"""Command line: `python -m scripts.drill --repository model_repository`. Exit codes: 0 passed, 1 failed."""

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from attention_client import AttentionClient

from scripts.drill.envoy import envoy
from scripts.drill.load import Caller
from scripts.drill.phases import Drill, Phase
from scripts.drill.report import problems, table
from scripts.drill.servers import Server, containers, has_image, processes

SERVERS = 3
# Longer than the client takes to find out that a server is frozen, 20 s.
FROZEN_SECONDS = 25.0
# Two attempts and more must fit into the client's timeout, 30 s.
ATTEMPT_SECONDS = 2.0


def main() -> int:
    """Runs the drill, prints its report and returns the exit status."""
    options = _arguments()
    with ExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="attention-drill-")))
        servers = stack.enter_context(_servers(options, logs))
        for server in servers:
            server.start()
        for server in servers:
            server.wait_until_ready()
        targets = [server.target for server in servers]
        if options.envoy:
            targets = [stack.enter_context(envoy(options.envoy, targets, logs))]
        drill = Drill(servers, options.seconds, options.frozen_seconds)
        callers = stack.enter_context(_callers(targets))
        drill.run(options.upgrade_image, _print_progress)
    return _report(callers, drill.phases, options.report)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Stop, freeze, kill and upgrade servers while calls go on; fail if a call fails."
    )
    parser.add_argument(
        "--repository", type=Path, required=True, help="model repository, with the demo models"
    )
    parser.add_argument("--image", default="attention-serving:latest", help="image of the containers")
    parser.add_argument("--upgrade-image", help="image of the upgrade; default: the same")
    parser.add_argument("--processes", action="store_true", help="processes on loopback, not containers")
    parser.add_argument("--envoy", metavar="PROGRAM", help="call through Envoy, with deploy/envoy/envoy.yaml")
    parser.add_argument(
        "--seconds", type=float, default=5.0, help="how long each phase is watched, in seconds"
    )
    parser.add_argument(
        "--frozen-seconds",
        type=float,
        default=FROZEN_SECONDS,
        help="how long a server stays frozen, in seconds",
    )
    parser.add_argument("--report", type=Path, help="file that the table is appended to")
    return parser.parse_args()


@contextmanager
def _servers(options: argparse.Namespace, logs: Path) -> Iterator[list[Server]]:
    if options.processes or not has_image(options.image):
        if not options.processes:
            print(f"no Docker engine with the image {options.image}: the servers are processes", flush=True)
        with processes(SERVERS, options.repository, logs) as servers:
            yield servers
    else:
        with containers(SERVERS, options.image, options.repository) as servers:
            yield servers


@contextmanager
def _callers(targets: Sequence[str]) -> Iterator[list[Caller]]:
    """A client with default settings and one with a limit for each attempt, calling until the block ends."""
    with (
        AttentionClient(targets) as default,
        AttentionClient(targets, attempt_timeout=ATTEMPT_SECONDS) as limited,
    ):
        callers = [Caller("default", default), Caller(f"attempt_timeout={ATTEMPT_SECONDS:g}", limited)]
        for caller in callers:
            caller.start()
        yield callers
        for caller in callers:
            caller.stop()


def _print_progress(phase: Phase) -> None:
    print(f"{phase.end - phase.begin:6.1f} s  {phase.name}", flush=True)


def _report(callers: Sequence[Caller], phases: Sequence[Phase], file: Path | None) -> int:
    text = table(callers, phases)
    print(f"\n{text}\n")
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a") as output:
            output.write(f"{time.strftime('%Y-%m-%d')}\n\n{text}\n\n")
    found = problems(callers, phases)
    for problem in found:
        print(f"error: {problem}", file=sys.stderr)
    if not found:
        print(f"{sum(len(caller.calls) for caller in callers)} calls, none failed")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())

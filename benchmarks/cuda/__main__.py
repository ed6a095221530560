"""Runs one step, for the kit: `python -m benchmarks.cuda STEP FILE CACHE DEVICE QUICK`."""

import importlib
import json
import sys
from pathlib import Path

from attention_serving.server.engine.run.provider import Provider
from benchmarks.cuda.kit import STEPS
from benchmarks.cuda.settings import Settings


def main(name: str, file: Path, settings: Settings) -> None:
    """Writes the rows of a step to a file, one in a line, each as soon as it is known."""
    step = STEPS[name]
    function = getattr(importlib.import_module(f"benchmarks.cuda.{step.module}"), step.function)
    with file.open("w") as lines:
        for row in function(settings, *step.arguments):
            lines.write(f"{json.dumps(row)}\n")
            lines.flush()


if __name__ == "__main__":
    name, file, cache, device, quick = sys.argv[1:]
    main(name, Path(file), Settings(Path(cache), Provider(device), bool(int(quick))))

"""Whether the device can be used, and what it is."""

import sys
from dataclasses import asdict

from attention_serving.server.engine.run import cuda
from attention_serving.server.engine.run.provider import ProviderError
from benchmarks.cuda.plan import Run
from benchmarks.cuda.records import Records


def check(run: Run, records: Records) -> None:
    """Records the device. Ends the process with the reason if there is none."""
    if run.device != "cuda":
        return
    try:
        records.add(**asdict(cuda.find_device()), cuda=cuda.cuda_version())
    except ProviderError as error:
        sys.exit(f"no GPU to measure: {error}")

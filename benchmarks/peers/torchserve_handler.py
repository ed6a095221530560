"""The handler of TorchServe: ONNX Runtime on all cores. TorchServe loads it in its own environment.

A request is the float32 bytes of one (T, d) sequence; the response is the bytes of its (T, d) result.
"""

import os
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime


def handle(data: list[dict[str, Any]] | None, context: Any) -> list[bytes] | None:
    """Runs a batch: together if all lengths agree, one by one otherwise."""
    folder = context.system_properties["model_dir"]
    session = _session(Path(folder) / context.manifest["model"]["serializedFile"])
    if data is None:  # TorchServe loads the handler this way
        return None
    width = session.get_inputs()[0].shape[-1]
    rows = [np.frombuffer(one.get("data") or one["body"], np.float32).reshape(-1, width) for one in data]
    if len({len(one) for one in rows}) == 1:
        return [result.tobytes() for result in _run(session, np.stack(rows))]
    return [_run(session, one[None])[0].tobytes() for one in rows]


def _run(session: onnxruntime.InferenceSession, query: Any) -> Any:
    """(B, T, d) to (B, T, d)."""
    return session.run(None, {session.get_inputs()[0].name: query})[0]


@lru_cache
def _session(graph: Path) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = len(os.sched_getaffinity(0))
    return onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])

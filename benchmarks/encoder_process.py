"""Embeds texts in a process of its own, by this project's engine or by sentence-transformers.

Each line of standard input is the name of a JSON file of texts, the number of texts of a call, and the name
of a NumPy file for the embeddings. Each line of standard output is how many seconds all calls took. Needs one
of the two libraries only, so that the interpreter of another environment can run it.
"""

import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

OURS = "ours"
# OpenVINO would compute in bfloat16 on processors that have it.
FP32 = {"openvino": {"ov_config": {"INFERENCE_PRECISION_HINT": "f32"}}}
# Portions of a call for each core: of similar lengths, because sequences of equal lengths run together.
PORTIONS = 4


def open_backend(backend: str, folder: str) -> Callable[[Sequence[str]], Any]:
    """The function that embeds the texts of one call.

    Args:
        backend: `ours`, or a backend of sentence-transformers: torch, onnx or openvino.
        folder: Folder of a model, of this project or as the library saves it.
    """
    if backend == OURS:
        return _ours(Path(folder))
    from sentence_transformers import SentenceTransformer  # noqa: PLC0415

    options: Any = {"backend": backend, "model_kwargs": FP32.get(backend)}
    model = SentenceTransformer(folder, device="cpu", **options)
    return lambda texts: model.encode(list(texts), show_progress_bar=False)


def _ours(folder: Path) -> Callable[[Sequence[str]], Any]:
    from attention_serving.artifact.encoder import EMBEDDING  # noqa: PLC0415
    from attention_serving.server.engine.in_process import InProcessModel  # noqa: PLC0415

    model = InProcessModel.load(folder.parent, folder.name)

    def embed(texts: Sequence[str]) -> Any:
        ids, _ = model.encode(texts)
        order = sorted(range(len(ids)), key=lambda at: -len(ids[at]))
        size = -(-len(order) // (PORTIONS * model.parallel_runs))
        portions = [order[at : at + size] for at in range(0, len(order), size)]
        jobs = [model.submit({model.inputs[0].name: [ids[at] for at in portion]}) for portion in portions]
        embeddings = np.stack([row for job in jobs for row in job.result().outputs[EMBEDDING]])
        return embeddings[np.argsort(order)]

    return embed


def main() -> None:
    """Opens the model, and answers requests until standard input ends."""
    embed = open_backend(*sys.argv[1:])
    print("ready", flush=True)  # noqa: T201
    for line in sys.stdin:
        texts_file, size, result = line.split()
        texts = json.loads(Path(texts_file).read_text())
        calls = [texts[at : at + int(size)] for at in range(0, len(texts), int(size))]
        started = time.perf_counter()
        embeddings = [embed(call) for call in calls]
        seconds = time.perf_counter() - started
        np.save(result, np.concatenate(embeddings))
        print(seconds, flush=True)  # noqa: T201


if __name__ == "__main__":
    main()

"""The demo: exports and serves models, sends requests, and prints served values beside eager PyTorch's.

`python -m scripts.demo --repository model_repository` ends with status 0 if all of them agree.
"""

import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from attention_client import AttentionClient
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from attention_serving.export.precision import FP32_TOLERANCE
from attention_serving.model.attention import MultiHeadAttention
from attention_serving.model.presets import SENTENCE, build_preset
from attention_serving.model.text import TextAttention
from scripts.export_demo_models import export_demo_models
from scripts.local_server import serving

Array = NDArray[Any]
LENGTHS = (6, 1, 128, 33, 300)
VALUES = 3  # of each vector
console = Console(highlight=False)


def main() -> int:
    """Runs the demo and returns the exit status."""
    repository = export_demo_models("Serves the demo models and compares results with PyTorch.")
    with tempfile.TemporaryDirectory() as folder, serving(repository, Path(folder) / "log") as server:
        console.print(f"serving {repository} on {server.target}")
        with AttentionClient(server.target) as client:
            agree = [_show_sentence(client), _show_batch(client)]
        server.stop()
    if not all(agree):
        return 1
    console.print('Next, start a server and go on with README.md, "Quick start":')
    options = "--model-control poll --repository-poll-seconds 1"
    console.print(f"  .venv/bin/python -m server --model-repository {repository} {options}", soft_wrap=True)
    return 0


def _show_sentence(client: AttentionClient) -> bool:
    """Text in, one context vector for each word."""
    module = build_preset("sentence-self-attention")
    if not isinstance(module, TextAttention):
        raise TypeError("the preset takes text")
    served = client.attend_text("sentence-self-attention", SENTENCE).context_vectors
    tokens = module.tokenizer.encode(SENTENCE)
    eager = _eager(module, np.array(tokens.ids))
    console.print(f"{SENTENCE!r} through sentence-self-attention:")
    return _compare("word", tokens.tokens, [row[None] for row in served], [row[None] for row in eager])


def _show_batch(client: AttentionClient) -> bool:
    """Sequences of different lengths in one request, without padding."""
    module = build_preset("multi-head-768x12")
    rng = np.random.default_rng(0)
    sequences = [rng.standard_normal((length, 768), dtype=np.float32) for length in LENGTHS]
    served = client.attend("multi-head-768x12", sequences).context_vectors
    console.print("one request through multi-head-768x12:")
    return _compare("length", map(str, LENGTHS), served, [_eager(module, rows) for rows in sequences])


def _compare(label: str, labels: Iterable[str], served: list[Array], eager: list[Array]) -> bool:
    """Prints the first vector of each result beside eager PyTorch's; whether all vectors agree."""
    table = Table(label, "served", "eager PyTorch", "largest difference")
    pairs = list(zip(served, eager, strict=True))
    for name, (ours, theirs) in zip(labels, pairs, strict=True):
        table.add_row(name, _row(ours[0]), _row(theirs[0]), f"{np.abs(ours - theirs).max():.2g}")
    console.print(table)
    error = max(FP32_TOLERANCE.error(*pair) for pair in pairs)
    agree = all(FP32_TOLERANCE.holds(*pair) for pair in pairs)
    console.print(f"largest difference {error:.2g}; {'within' if agree else 'MISSES'} {FP32_TOLERANCE}\n")
    return agree


def _eager(module: MultiHeadAttention | TextAttention, sequence: Array) -> Array:
    """(T, ...) to (T, d_out), in PyTorch."""
    with torch.inference_mode():
        context, _ = module(torch.from_numpy(sequence)[None])
    array: Array = context[0].numpy()
    return array


def _row(vector: Array) -> str:
    return " ".join(f"{value: .6f}" for value in vector[:VALUES])


if __name__ == "__main__":
    sys.exit(main())

"""The ways to compute embeddings of texts that are compared. Each takes texts and returns (B, d)."""

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
import typer
from attention_client import AttentionClient
from numpy.typing import NDArray
from tokenizers import Tokenizer

from attention_serving.export.encoder import write_encoder
from attention_serving.export.errors import ParityError
from attention_serving.export.model_id import ModelId
from attention_serving.export.precision import Precision
from attention_serving.model.encoder_folder.loading import load_encoder
from attention_serving.server import machine
from attention_serving.server.engine.in_process import InProcessModel
from scripts.local_server import serving

Embeddings = NDArray[np.float32]
Encode = Callable[[Sequence[str]], Embeddings]
PRECISIONS = (Precision.FP32, Precision.INT8)
# Of sentence-transformers by default, and of fastembed.
BATCHES = (32, 256)
# Requests that are computed at the same time, in process.
REQUESTS = 2


def sentence_transformers(folder: Path) -> dict[str, Encode]:
    """The package sentence-transformers with PyTorch; empty if it is not installed."""
    if importlib.util.find_spec("sentence_transformers") is None:
        return {}
    from sentence_transformers import SentenceTransformer  # noqa: PLC0415

    model: Any = SentenceTransformer(str(folder), device="cpu")

    def encode(texts: Sequence[str]) -> Embeddings:
        found: Embeddings = model.encode(list(texts), batch_size=BATCHES[0], show_progress_bar=False)
        return found

    return {"sentence-transformers, torch": encode}


def eager(model: Any, folder: Path) -> dict[str, Encode]:
    """Eager PyTorch with transformers, batched and padded as sentence-transformers does it."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    def forward(ids: NDArray[np.int64], mask: NDArray[np.int64]) -> Embeddings:
        with torch.inference_mode():
            rows = model(input_ids=torch.from_numpy(ids), attention_mask=torch.from_numpy(mask))
        found: Embeddings = rows.last_hidden_state.numpy()
        return found

    return {
        "transformers, torch": lambda texts: _padded(tokenizer, forward, texts, BATCHES[0], by_length=True)
    }


def padded_onnx(model: Any, folder: Path) -> dict[str, Encode]:
    """The model as transformers has it, exported to ONNX: padded batches on all cores.

    Batches of 32 texts of similar length are sentence-transformers' way with its ONNX backend; batches of 256
    in the order of the texts are fastembed's.
    """
    file = folder / "padded.onnx"
    ids, mask = torch.ones(2, 2, 8, dtype=torch.int64)
    axes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("length", max=512)}
    torch.onnx.export(
        _LastHiddenState(model),
        (ids, mask),
        file,
        dynamo=True,
        input_names=["ids", "mask"],
        dynamic_shapes=(axes, axes),
        verbose=False,
    )
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = machine.available_cores()
    session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    def forward(ids: NDArray[np.int64], mask: NDArray[np.int64]) -> Embeddings:
        found: Embeddings = session.run(None, {"ids": ids, "mask": mask})[0]
        return found

    def encode(texts: Sequence[str], *, size: int) -> Embeddings:
        return _padded(tokenizer, forward, texts, size, by_length=size == BATCHES[0])

    return {f"ONNX Runtime, padded batches of {size}": partial(encode, size=size) for size in BATCHES}


class _LastHiddenState(torch.nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.model(input_ids=ids, attention_mask=mask).last_hidden_state
        return found


def _padded(
    tokenizer: Tokenizer,
    forward: Callable[[NDArray[np.int64], NDArray[np.int64]], Embeddings],
    texts: Sequence[str],
    size: int,
    *,
    by_length: bool,
) -> Embeddings:
    """Normalised means of token vectors, computed in batches that are padded to their longest text."""
    order = (
        sorted(range(len(texts)), key=lambda index: -len(texts[index])) if by_length else [*range(len(texts))]
    )
    found: list[Any] = [None] * len(texts)
    for start in range(0, len(order), size):
        indices = order[start : start + size]
        tokens = [encoding.ids for encoding in tokenizer.encode_batch([texts[index] for index in indices])]
        longest = max(map(len, tokens))
        ids, mask = np.zeros((2, len(tokens), longest), np.int64)
        for row, own in enumerate(tokens):
            ids[row, : len(own)], mask[row, : len(own)] = own, 1
        rows = forward(ids, mask)
        pooled = (rows * mask[:, :, None]).sum(axis=1) / mask.sum(axis=1, keepdims=True)
        pooled /= np.linalg.norm(pooled, axis=1, keepdims=True)
        for index, embedding in zip(indices, pooled, strict=True):
            found[index] = embedding
    return np.stack(found).astype(np.float32)


def write_repository(folder: Path, repository: Path) -> list[Precision]:
    """Exports the folder in every precision, under the precision's name; returns those that hold.

    With random weights, the token vectors of a large int8 model can miss the tolerance.
    """
    loaded, written = load_encoder(folder), []
    for precision in PRECISIONS:
        try:
            write_encoder(loaded, ModelId(precision.value), repository, precision=precision)
        except ParityError as error:
            typer.echo(f"{precision.value} is left out: {error}\n")
        else:
            written.append(precision)
    return written


@contextmanager
def in_process(repository: Path, precisions: Sequence[Precision]) -> Iterator[dict[str, Encode]]:
    """This project's engine in the same process."""
    models = {each: InProcessModel.load(repository, each.value) for each in precisions}
    try:
        yield {f"this project in process, {name.value}": _submitting(each) for name, each in models.items()}
    finally:
        for each in models.values():
            each.close()


def _submitting(model: InProcessModel) -> Encode:
    def encode(texts: Sequence[str]) -> Embeddings:
        # Texts of similar length go together; each request has some of all lengths.
        order = sorted(range(len(texts)), key=lambda index: len(texts[index]))
        count = REQUESTS * model.parallel_runs
        parts = [part for start in range(count) if (part := order[start::count])]
        calls = [model.submit({}, texts=[texts[index] for index in part]) for part in parts]
        found: list[Any] = [None] * len(texts)
        for part, call in zip(parts, calls, strict=True):
            for index, embedding in zip(part, call.result().outputs["embedding"], strict=True):
                found[index] = embedding
        return np.stack(found)

    return encode


@contextmanager
def served(repository: Path, precisions: Sequence[Precision], log: Path) -> Iterator[dict[str, Encode]]:
    """This project's server, asked by one client in one call."""
    with serving(repository, log) as process, AttentionClient(process.target) as client:

        def asking(name: str) -> Encode:
            return lambda texts: client.embed(name, list(texts), timeout=600)

        yield {f"this project through the server, {each.value}": asking(each.value) for each in precisions}

"""A text encoder against eager transformers in one process: `python -m benchmarks.encoders [--layers 6]`.

Both compute the same token ids with the same random weights, by turns, on the same cores. transformers runs
in batches of 32, longest first, padded to the longest of a batch, as sentence-transformers does. This
project's engine plans its own batches. Lengths are lognormal with a mean of 60 tokens.
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import numpy as np
import torch
import transformers
import typer
from numpy.typing import NDArray
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from export.encoder import write_encoder
from export.model_id import ModelId
from export.precision import Precision
from model.encoder_folder.loading import load_encoder
from server import cores
from server.engine.in_process import InProcessModel

VOCABULARY, BATCH, LONGEST, MEAN_LENGTH, SPREAD = 30_522, 32, 512, 60, 0.7
PRECISIONS = (Precision.FP32, Precision.INT8)
Ids = Sequence[NDArray[np.int64]]
Encode = Callable[[Ids], NDArray[np.float32]]


def main(
    layers: Annotated[int, typer.Option(min=1)] = 6,
    width: Annotated[int, typer.Option(min=64)] = 384,
    texts: Annotated[int, typer.Option(min=1)] = 256,
    rounds: Annotated[int, typer.Option(min=1)] = 5,
) -> None:
    """Print tokens per second of each way, and how far their embeddings are apart."""
    torch.set_num_threads(cores.available())
    config = transformers.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=width // 32,
        intermediate_size=4 * width,
    )
    torch.manual_seed(0)
    reference: Any = transformers.BertModel(config)
    reference.eval()
    with TemporaryDirectory() as folder:
        repository = _export(reference, Path(folder))
        models = {each: InProcessModel.load(repository, each.value) for each in PRECISIONS}
        ways: dict[str, Encode] = {"transformers, eager": lambda ids: _eager(reference, ids)}
        ways |= {f"this project, {name.value}": _engine(model) for name, model in models.items()}
        _report(ways, _random_ids(texts), rounds)
        for model in models.values():
            model.close()


def _export(reference: Any, folder: Path) -> Path:
    reference.save_pretrained(folder / "source")
    tokenizer = Tokenizer(WordLevel({"[UNK]": 0}, unk_token="[UNK]"))  # noqa: S106 - a token of texts
    tokenizer.save(str(folder / "source/tokenizer.json"))
    loaded = load_encoder(folder / "source")
    for precision in PRECISIONS:
        write_encoder(loaded, ModelId(precision.value), folder / "repository", precision=precision)
    return folder / "repository"


def _random_ids(count: int) -> Ids:
    rng = np.random.default_rng(0)
    lengths = rng.lognormal(np.log(MEAN_LENGTH) - SPREAD**2 / 2, SPREAD, count).clip(1, LONGEST).astype(int)
    return [rng.integers(1, VOCABULARY, length) for length in lengths]


def _eager(reference: Any, ids: Ids) -> NDArray[np.float32]:
    order = sorted(range(len(ids)), key=lambda index: -len(ids[index]))
    found: list[Any] = [None] * len(ids)
    for start in range(0, len(order), BATCH):
        indices = order[start : start + BATCH]
        longest = len(ids[indices[0]])
        padded, mask = torch.zeros(2, len(indices), longest, dtype=torch.int64)
        for row, index in enumerate(indices):
            length = len(ids[index])
            padded[row, :length], mask[row, :length] = torch.from_numpy(ids[index]), 1
        with torch.inference_mode():
            rows = reference(input_ids=padded, attention_mask=mask).last_hidden_state
            pooled = (rows * mask[:, :, None]).sum(dim=1) / mask.sum(dim=1, keepdim=True)
        for index, embedding in zip(indices, pooled, strict=True):
            found[index] = embedding.numpy()
    return np.stack(found)


def _engine(model: InProcessModel) -> Encode:
    def encode(ids: Ids) -> NDArray[np.float32]:
        # As many requests at a time as there are cores; texts of similar length go together.
        order = sorted(range(len(ids)), key=lambda index: len(ids[index]))
        parts = [order[start :: 2 * model.parallel_runs] for start in range(2 * model.parallel_runs)]
        calls = [model.submit({"token_ids": [ids[index] for index in part]}) for part in parts if part]
        found: list[Any] = [None] * len(ids)
        for part, call in zip([part for part in parts if part], calls, strict=True):
            for index, embedding in zip(part, call.result().outputs["embedding"], strict=True):
                found[index] = embedding
        return np.stack(found)

    return encode


def _report(ways: dict[str, Encode], ids: Ids, rounds: int) -> None:
    tokens = sum(map(len, ids))
    results = {name: encode(ids) for name, encode in ways.items()}  # warms up
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, encode in ways.items():
            started = time.perf_counter()
            encode(ids)
            seconds[name].append(time.perf_counter() - started)
    first = next(iter(ways))
    base = median(seconds[first])
    typer.echo(f"{len(ids)} texts, {tokens} tokens, {cores.available()} cores, medians of {rounds} rounds")
    for name, own in seconds.items():
        difference = float(np.abs(results[name] - results[first]).max())
        cosine = _least_cosine(results[name], results[first])
        typer.echo(
            f"{name}: {tokens / median(own):,.0f} tokens/s, {base / median(own):.2f} x; "
            f"largest difference {difference:.1e}, smallest cosine {cosine:.6f}"
        )


def _least_cosine(found: NDArray[np.float32], expected: NDArray[np.float32]) -> float:
    lengths = np.linalg.norm(found, axis=1) * np.linalg.norm(expected, axis=1)
    return float(((found * expected).sum(axis=1) / lengths).min())


if __name__ == "__main__":
    typer.run(main)

"""A text encoder beside sentence-transformers, if it is installed: `python -m benchmarks.encoders FOLDER`."""

import importlib.util
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import numpy as np
import torch
import typer
from attention_client import AttentionClient
from numpy.typing import NDArray

from attention_serving.artifact.names import ModelId
from attention_serving.export.artifact import write_artifact
from attention_serving.export.encoder import encoder_spec
from attention_serving.export.precision import Precision
from attention_serving.model.text_encoder import load_encoder
from benchmarks.markdown import table, text
from benchmarks.processes import cores
from scripts.local_server import serving

MEAN_LENGTH, SPREAD = 60, 0.7
Embeddings = NDArray[np.float32]
Encode = Callable[[Sequence[str]], Embeddings]


def main(
    folder: Annotated[
        Path, typer.Argument(help="Folder of the encoder, as sentence-transformers writes it.")
    ],
    texts: Annotated[int, typer.Option(min=1, help="Number of texts of a round.")] = 256,
    rounds: Annotated[int, typer.Option(min=1, help="How often each way is timed.")] = 5,
) -> None:
    """Print tokens per second of each way, and how far its embeddings are from those of the first.

    The ways are sentence-transformers with PyTorch, and one call to this project's server in fp32 and int8.
    Texts are random words of the encoder's vocabulary, with lognormal lengths and a mean of 60 words.
    """
    torch.set_num_threads(cores())
    loaded, compared = load_encoder(folder), dict[str, Encode]()
    if importlib.util.find_spec("sentence_transformers") is not None:
        from sentence_transformers import SentenceTransformer  # noqa: PLC0415

        library: Any = SentenceTransformer(str(folder), device="cpu")
        compared["sentence-transformers, torch"] = lambda given: library.encode(list(given))
    with TemporaryDirectory() as name:
        repository, log = Path(name, "repository"), Path(name, "log")
        for precision in (Precision.FP32, Precision.INT8):
            write_artifact(encoder_spec(loaded), ModelId(precision.value), repository, precision=precision)
        with serving(repository, log) as process, AttentionClient(process.target, timeout=600) as client:
            for precision in (Precision.FP32, Precision.INT8):
                compared[f"this project, {precision}"] = partial(client.embed, precision.value)
            given = random_texts(list(loaded.tokenizer.get_vocab()), texts)
            tokens = sum(len(each.ids) for each in loaded.tokenizer.encode_batch(given))
            typer.echo(f"{texts} texts, {tokens} tokens, {cores()} cores, medians of {rounds} rounds\n")
            typer.echo(report(compared, given, tokens, rounds))


def report(compared: dict[str, Encode], texts: list[str], tokens: int, rounds: int) -> str:
    """Measures the ways in rounds; returns a table."""
    results = {name: encode(texts) for name, encode in compared.items()}  # warms up
    seconds: dict[str, list[float]] = {name: [] for name in compared}
    for _ in range(rounds):
        for name, encode in compared.items():
            started = time.perf_counter()
            encode(texts)
            seconds[name].append(time.perf_counter() - started)
    first, rows = next(iter(compared)), []
    for name, own in seconds.items():
        ratio = median([base / mine for base, mine in zip(seconds[first], own, strict=True)])
        difference = np.abs(results[name] - results[first]).max()
        rows.append((name, text(tokens / median(own)), f"{ratio:.2f}", f"{difference:.1e}"))
    return table(("way", "tokens/s", "ratio", "largest difference"), rows)


def random_texts(words: list[str], count: int) -> list[str]:
    """Texts whose numbers of words are lognormal, 1 to 500."""
    rng = np.random.default_rng(0)
    lengths = rng.lognormal(np.log(MEAN_LENGTH) - SPREAD**2 / 2, SPREAD, count)
    return [" ".join(rng.choice(words, length)) for length in lengths.clip(1, 500).astype(int)]


if __name__ == "__main__":
    typer.run(main)

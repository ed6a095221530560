"""Embeddings of texts in several ways, by turns, on the same cores.

All ways tokenize the same texts and compute the same BERT with random weights. Texts have lognormal lengths
with a mean of 60 tokens.
"""

import importlib.util
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Annotated

import numpy as np
import torch
import typer

from attention_serving.export.precision import Precision
from attention_serving.server import machine
from benchmarks.encoders import table, ways
from benchmarks.encoders.folder import random_texts, write_folder


def main(
    layers: Annotated[int, typer.Option(min=1, help="Number of layers.")] = 6,
    width: Annotated[int, typer.Option(min=64, help="Width of a token vector.")] = 384,
    texts: Annotated[int, typer.Option(min=1, help="Number of texts of a round.")] = 256,
    rounds: Annotated[int, typer.Option(min=1, help="How often each way is timed.")] = 5,
    table_rows: Annotated[int, typer.Option(min=0, help="Rows of a table of short texts; 0 for none.")] = 0,
) -> None:
    """Print tokens per second of each way, and how far its embeddings are from those of the first."""
    torch.set_num_threads(machine.available_cores())
    with TemporaryDirectory() as name, ExitStack() as stack:
        folder, repository = Path(name, "encoder"), Path(name, "repository")
        model = write_folder(folder, layers, width)
        compared = ways.sentence_transformers(folder) or ways.eager(model, folder)
        compared |= ways.padded_onnx(model, folder)
        precisions = ways.write_repository(folder, repository)
        compared |= stack.enter_context(ways.in_process(repository, precisions))
        compared |= stack.enter_context(ways.served(repository, precisions, Path(name, "log")))
        _report(compared, random_texts(texts), rounds)
        if table_rows:
            _report_table(Path(name, "table.parquet"), table_rows, folder, repository, precisions)


def _report(compared: dict[str, ways.Encode], texts: list[str], rounds: int) -> None:
    results = {name: encode(texts) for name, encode in compared.items()}  # warms up
    seconds: dict[str, list[float]] = {name: [] for name in compared}
    for _ in range(rounds):
        for name, encode in compared.items():
            started = time.perf_counter()
            encode(texts)
            seconds[name].append(time.perf_counter() - started)
    tokens = sum(text.count(" ") + 3 for text in texts)  # words are tokens; two more at the ends
    first = next(iter(compared))
    typer.echo(
        f"{len(texts)} texts, {tokens} tokens, {machine.available_cores()} cores, medians of"
        f" {rounds} rounds\n"
    )
    typer.echo("| way | tokens/s | ratio | largest difference | smallest cosine |\n|---|---|---|---|---|")
    for name, own in seconds.items():
        ratio = median([base / mine for base, mine in zip(seconds[first], own, strict=True)])
        difference = np.abs(results[name] - results[first]).max()
        cosine = (results[name] * results[first]).sum(axis=1).min()
        typer.echo(
            f"| {name} | {tokens / median(own):,.0f} | {ratio:.2f} | {difference:.1e} | {cosine:.6f} |"
        )


def _report_table(file: Path, rows: int, folder: Path, repository: Path, precisions: list[Precision]) -> None:
    table.write_table(file, rows)
    jobs = {f"enrichment, {each.value}": table.enriched(file, repository, each.value) for each in precisions}
    reference = None
    if importlib.util.find_spec("sentence_transformers") is not None:
        reference = jobs["sentence-transformers"] = table.encoded(file, folder)
    typer.echo(
        f"\n{rows:,} texts of {table.SHORT_LENGTH} words on average, from file to file, one run each\n"
    )
    typer.echo("| job | rows/s | ratio | peak memory, MB | smallest cosine |\n|---|---|---|---|---|")
    for name, job in jobs.items():
        ratio = cosine = "-"
        if reference is not None:
            ratio = f"{reference.seconds / job.seconds:.2f}"
            cosine = f"{(job.embeddings * reference.embeddings).sum(axis=1).min():.6f}"
        typer.echo(
            f"| {name} | {rows / job.seconds:,.0f} | {ratio} | {job.peak_bytes / 1e6:,.0f} | {cosine} |"
        )


if __name__ == "__main__":
    typer.run(main)

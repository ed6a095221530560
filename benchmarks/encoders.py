"""Text encoders beside sentence-transformers, if it is installed: `python -m benchmarks.encoders`.

All ways tokenize the same texts and compute the same BERT with random weights. Texts have lognormal lengths
with a mean of 60 tokens.
"""

import importlib.util
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import numpy as np
import torch
import transformers
import typer
from attention_client import AttentionClient
from numpy.typing import NDArray
from tokenizers import Tokenizer, pre_tokenizers, processors
from tokenizers.models import WordLevel

from attention_serving.artifact.names import ModelId
from attention_serving.export.artifact import write_artifact
from attention_serving.export.encoder import encoder_spec
from attention_serving.export.errors import ParityError
from attention_serving.export.precision import Precision
from attention_serving.model.encoder_folder.loading import load_encoder
from attention_serving.server import machine
from attention_serving.server.engine.in_process import InProcessModel
from scripts.local_server import serving

LONGEST, MEAN_LENGTH, SPREAD = 512, 60, 0.7
SPECIAL = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
# Heads of narrow models have 32 elements, as those of MiniLM; others have 64.
NARROW = 384
WORDS = [f"w{number}" for number in range(30_000)]
# Requests that are computed at the same time, in process.
REQUESTS = 2
Embeddings = NDArray[np.float32]
Encode = Callable[[Sequence[str]], Embeddings]


def main(
    layers: Annotated[int, typer.Option(min=1, help="Number of layers.")] = 6,
    width: Annotated[int, typer.Option(min=64, help="Width of a token vector; a multiple of 64.")] = 384,
    texts: Annotated[int, typer.Option(min=1, help="Number of texts of a round.")] = 256,
    rounds: Annotated[int, typer.Option(min=1, help="How often each way is timed.")] = 5,
) -> None:
    """Print tokens per second of each way, and how far its embeddings are from those of the first."""
    torch.set_num_threads(machine.available_cores())
    with TemporaryDirectory() as name, ExitStack() as stack:
        folder, repository = Path(name, "encoder"), Path(name, "repository")
        write_folder(folder, layers, width)
        compared = sentence_transformers(folder)
        precisions = write_repository(folder, repository)
        compared |= stack.enter_context(in_process(repository, precisions))
        compared |= stack.enter_context(served(repository, precisions, Path(name, "log")))
        report(compared, random_texts(texts), rounds)


def report(compared: dict[str, Encode], texts: list[str], rounds: int) -> None:
    """Measures the ways in rounds, and prints a table."""
    results = {name: encode(texts) for name, encode in compared.items()}  # warms up
    seconds: dict[str, list[float]] = {name: [] for name in compared}
    for _ in range(rounds):
        for name, encode in compared.items():
            started = time.perf_counter()
            encode(texts)
            seconds[name].append(time.perf_counter() - started)
    tokens = sum(text.count(" ") + 3 for text in texts)  # words are tokens; two more at the ends
    cores, first = machine.available_cores(), next(iter(compared))
    typer.echo(f"{len(texts)} texts, {tokens} tokens, {cores} cores, medians of {rounds} rounds\n")
    typer.echo("| way | tokens/s | ratio | largest difference | smallest cosine |\n|---|---|---|---|---|")
    for name, own in seconds.items():
        ratio = median([base / mine for base, mine in zip(seconds[first], own, strict=True)])
        difference = np.abs(results[name] - results[first]).max()
        cosine = (results[name] * results[first]).sum(axis=1).min()
        rate = tokens / median(own)
        typer.echo(f"| {name} | {rate:,.0f} | {ratio:.2f} | {difference:.1e} | {cosine:.6f} |")


def write_folder(folder: Path, layers: int, width: int) -> None:
    """Writes a folder of sentence-transformers."""
    library: Any = transformers
    config = library.BertConfig(
        vocab_size=len(SPECIAL) + len(WORDS),
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=width // (32 if width <= NARROW else 64),
        intermediate_size=4 * width,
        max_position_embeddings=LONGEST,
    )
    torch.manual_seed(0)
    library.BertModel(config).save_pretrained(folder)
    vocabulary = {word: number for number, word in enumerate([*SPECIAL.values(), *WORDS])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="[UNK]"))  # noqa: S106 - not a password
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    wrapped = library.PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=LONGEST, **SPECIAL)
    wrapped.save_pretrained(folder)
    kinds = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
    modules = [
        {"idx": at, "name": str(at), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for at, (kind, path) in enumerate(kinds.items())
    ]
    for path in kinds.values():
        (folder / path).mkdir(exist_ok=True)
    for name, content in (
        ("modules.json", modules),
        ("1_Pooling/config.json", {"word_embedding_dimension": width, "pooling_mode_mean_tokens": True}),
        ("sentence_bert_config.json", {"max_seq_length": LONGEST, "do_lower_case": False}),
    ):
        (folder / name).write_text(json.dumps(content))


def random_texts(count: int) -> list[str]:
    """Texts whose numbers of words are lognormal, 1 to 500."""
    rng = np.random.default_rng(0)
    lengths = rng.lognormal(np.log(MEAN_LENGTH) - SPREAD**2 / 2, SPREAD, count)
    return [" ".join(rng.choice(WORDS, length)) for length in lengths.clip(1, LONGEST - 12).astype(int)]


def sentence_transformers(folder: Path) -> dict[str, Encode]:
    """The package sentence-transformers with PyTorch; empty if it is not installed."""
    if importlib.util.find_spec("sentence_transformers") is None:
        return {}
    from sentence_transformers import SentenceTransformer  # noqa: PLC0415

    model: Any = SentenceTransformer(str(folder), device="cpu")
    return {"sentence-transformers, torch": lambda texts: model.encode(list(texts), show_progress_bar=False)}


def write_repository(folder: Path, repository: Path) -> list[str]:
    """Exports the folder in every precision, under the precision's name; returns those that hold.

    With random weights, the token vectors of a large int8 model can miss the tolerance.
    """
    loaded, written = load_encoder(folder), []
    for precision in (Precision.FP32, Precision.INT8):
        try:
            write_artifact(encoder_spec(loaded), ModelId(precision.value), repository, precision=precision)
        except ParityError as error:
            typer.echo(f"{precision.value} is left out: {error}\n")
        else:
            written.append(precision.value)
    return written


@contextmanager
def in_process(repository: Path, precisions: Sequence[str]) -> Iterator[dict[str, Encode]]:
    """This project's engine in the same process."""
    models = {name: InProcessModel.load(repository, name) for name in precisions}
    try:
        yield {f"this project in process, {name}": _submitting(model) for name, model in models.items()}
    finally:
        for model in models.values():
            model.close()


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
def served(repository: Path, precisions: Sequence[str], log: Path) -> Iterator[dict[str, Encode]]:
    """This project's server, asked by one client in one call."""
    with serving(repository, log) as process, AttentionClient(process.target) as client:
        yield {
            f"this project through the server, {name}": partial(_asking, client, name) for name in precisions
        }


def _asking(client: AttentionClient, name: str, texts: Sequence[str]) -> Embeddings:
    embeddings: Embeddings = client.embed(name, list(texts), timeout=600)
    return embeddings


if __name__ == "__main__":
    typer.run(main)

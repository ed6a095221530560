"""Text encoders beside sentence-transformers and padded ONNX Runtime: `python -m benchmarks.encoders`.

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
import onnxruntime
import torch
import transformers
import typer
from attention_client import AttentionClient
from numpy.typing import NDArray
from tokenizers import Tokenizer, normalizers, pre_tokenizers, processors
from tokenizers.models import WordPiece

from attention_serving.export.encoder import write_encoder
from attention_serving.export.errors import ParityError
from attention_serving.export.model_id import ModelId
from attention_serving.export.precision import Precision
from attention_serving.model.encoder_folder.loading import load_encoder
from attention_serving.server import machine
from attention_serving.server.engine.in_process import InProcessModel
from scripts.local_server import serving

LONGEST, MEAN_LENGTH, SPREAD = 512, 60, 0.7
NAMES = {name: f"[{name[:3].upper()}]" for name in ("pad_token", "unk_token", "cls_token", "sep_token")}
SPECIAL = tuple(NAMES.values())
# Heads of narrow models have 32 elements, as those of MiniLM; others have 64.
NARROW = 384
VOCABULARY = 30_522
Embeddings = NDArray[np.float32]
Encode = Callable[[Sequence[str]], Embeddings]
PRECISIONS = (Precision.FP32, Precision.INT8)
# Of sentence-transformers by default, and of fastembed.
BATCHES = (32, 256)
# Requests that are computed at the same time, in process.
REQUESTS = 2


def main(
    layers: Annotated[int, typer.Option(min=1, help="Number of layers.")] = 6,
    width: Annotated[int, typer.Option(min=64, help="Width of a token vector.")] = 384,
    texts: Annotated[int, typer.Option(min=1, help="Number of texts of a round.")] = 256,
    rounds: Annotated[int, typer.Option(min=1, help="How often each way is timed.")] = 5,
) -> None:
    """Print tokens per second of each way, and how far its embeddings are from those of the first."""
    torch.set_num_threads(machine.available_cores())
    with TemporaryDirectory() as name, ExitStack() as stack:
        folder, repository = Path(name, "encoder"), Path(name, "repository")
        model = write_folder(folder, layers, width)
        compared = sentence_transformers(folder)
        compared |= padded_onnx(model, folder)
        precisions = write_repository(folder, repository)
        compared |= stack.enter_context(in_process(repository, precisions))
        compared |= stack.enter_context(served(repository, precisions, Path(name, "log")))
        _report(compared, random_texts(texts), rounds)


def _report(compared: dict[str, Encode], texts: list[str], rounds: int) -> None:
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


def write_folder(folder: Path, layers: int, width: int) -> Any:
    """Writes the folder and returns its model, as transformers computes it.

    Args:
        folder: Is created.
        layers: Number of layers.
        width: Width of a token vector; a multiple of 64.
    """
    config = transformers.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=width // (32 if width <= NARROW else 64),
        intermediate_size=4 * width,
        max_position_embeddings=LONGEST,
    )
    torch.manual_seed(0)
    library: Any = transformers
    model = library.BertModel(config).eval()
    model.save_pretrained(folder)
    wrapped = library.PreTrainedTokenizerFast(
        tokenizer_object=_tokenizer(),
        model_max_length=LONGEST,
        **NAMES,
    )
    wrapped.save_pretrained(folder)
    _write_modules(folder, width)
    return model


def _tokenizer() -> Tokenizer:
    words = [*SPECIAL, *(_word(number) for number in range(VOCABULARY - len(SPECIAL)))]
    tokenizer = Tokenizer(
        WordPiece({word: number for number, word in enumerate(words)}, unk_token=NAMES["unk_token"])
    )
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    ends = [(name, SPECIAL.index(name)) for name in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=ends
    )
    return tokenizer


def _word(number: int) -> str:
    """A word of letters, another one for each number."""
    letters = ""
    for _ in range(4):
        number, digit = divmod(number, 26)
        letters += chr(ord("a") + digit)
    return letters


def _write_modules(folder: Path, width: int) -> None:
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
        {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
        {"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"},
    ]
    pooling = {"word_embedding_dimension": width, "pooling_mode_mean_tokens": True}
    lengths = {"max_seq_length": LONGEST, "do_lower_case": False}
    for name in ("1_Pooling", "2_Normalize"):
        (folder / name).mkdir()
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling/config.json").write_text(json.dumps(pooling))
    (folder / "sentence_bert_config.json").write_text(json.dumps(lengths))


def random_texts(count: int, mean_length: int = MEAN_LENGTH, seed: int = 0) -> list[str]:
    """Texts whose numbers of words are lognormal, 1 to 500."""
    rng = np.random.default_rng(seed)
    lengths = rng.lognormal(np.log(mean_length) - SPREAD**2 / 2, SPREAD, count)
    words = VOCABULARY - len(SPECIAL)
    return [
        " ".join(map(_word, rng.integers(words, size=length)))
        for length in lengths.clip(1, LONGEST - 12).astype(int)
    ]


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


if __name__ == "__main__":
    typer.run(main)

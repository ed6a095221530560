"""A text encoder beside other libraries and servers on the same texts."""

import asyncio
import base64
import http.client
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Annotated, Any
from urllib.parse import SplitResult, urlsplit

import numpy as np
import torch
import typer
from numpy.typing import NDArray

from attention_serving.artifact.names import ModelId
from attention_serving.artifact.tolerance import cosines
from attention_serving.export.artifact import write_artifact
from attention_serving.export.encoder import encoder_spec
from attention_serving.export.precision import Precision
from attention_serving.export.verify import read_help
from attention_serving.model.text_folders import load_encoder
from attention_serving.protos.attention.v1 import attention_pb2 as pb
from benchmarks import encoder_process
from benchmarks.channel import EncodedRequest, UnaryCaller
from benchmarks.load import MeasurementWindow, measure
from benchmarks.markdown import table, text
from benchmarks.processes import cores
from benchmarks.wire import METHODS, Api
from scripts.local_server import ROOT, serving

MEAN_WORDS, SPREAD, QUERY_WORDS = 55, 0.7, 6
CALLERS, SECONDS, WARM_SECONDS = 32, 2.0, 0.5
OURS = {f"this project, {precision}": precision for precision in (Precision.FP32, Precision.INT8)}
Embeddings = NDArray[np.float32]
# Embeds texts, so many in a call: the seconds of all calls, and the embeddings.
Embed = Callable[[Sequence[str], int], tuple[float, Embeddings]]


def main(
    folder: Annotated[Path, typer.Argument()],
    library: list[str] | None = None,
    server: list[str] | None = None,
    rounds: Annotated[int, typer.Option(min=1)] = 5,
) -> None:
    """Print texts per second of this project in fp32 and int8 and of others, measured by turns.

    Each library has a process of its own. Servers are asked from this process. Texts are random words of the
    encoder's vocabulary, lognormal in number. Ratios are to the first way, round by round.

    Options:
        folder: Folder of the encoder, as sentence-transformers saves it.
        library: NAME=PYTHON,BACKEND: sentence-transformers in the environment of an interpreter, with its
            backend torch, onnx or openvino. May be repeated.
        server: NAME=URL,MODEL: a running server, by the URL of its embeddings as OpenAI has them. May be
            repeated.
        rounds: How often each way is timed.
    """
    torch.set_num_threads(cores())
    loaded = load_encoder(folder)
    texts, queries = _texts([word for word in loaded.tokenizer.get_vocab() if word.isalpha()])
    calls = {
        "512 texts, 32 in a call": (texts, 32),
        "256 in a call": (texts, 256),
        "2,000 queries, 256 in a call": (queries, 256),
    }
    tokens = [sum(map(len, loaded.tokenizer.encode_batch(group))) for group in (texts, queries)]
    typer.echo(f"{cores()} cores, medians of {rounds} rounds; tokens: {tokens[0]:,} and {tokens[1]:,}\n")
    programs = {name: (*values, str(folder)) for name, *values in map(_parse, library or ())}
    endpoints = {name: (urlsplit(address), model) for name, address, model in map(_parse, server or ())}
    with TemporaryDirectory() as name:
        work, spec = Path(name), encoder_spec(loaded)
        for label, precision in OURS.items():
            path, _ = write_artifact(spec, ModelId(precision.value), work / "models", precision=precision)
            programs[label] = sys.executable, encoder_process.OURS, str(path.parent)
        with ExitStack() as stack:
            libraries = {
                label: stack.enter_context(_library(work, *program)) for label, program in programs.items()
            }
            typer.echo(f"In process, texts per second\n\n{compare(libraries, calls, rounds)}\n")
        with serving(work / "models", work / "log", "--http-port=0") as process:
            url = urlsplit(f"http://127.0.0.1:{process.http_port}/v1/embeddings")
            endpoints |= {label: (url, precision.value) for label, precision in OURS.items()}
            posts = {label: partial(_post, *endpoint) for label, endpoint in endpoints.items()}
            typer.echo(f"Over HTTP, texts per second\n\n{compare(posts, calls, rounds)}\n")
            singles = {
                f"{label}, HTTP": partial(_singles, *endpoint, queries)
                for label, endpoint in endpoints.items()
            }
            singles |= {
                f"{label}, gRPC": partial(_grpc_singles, process.target, precision.value, queries)
                for label, precision in OURS.items()
            }
            typer.echo(f"Single queries\n\n{compare_singles(singles, rounds)}")


def _texts(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Texts of random words, lognormal in number, and queries."""
    rng = np.random.default_rng(0)
    lengths = rng.lognormal(np.log(MEAN_WORDS) - SPREAD**2 / 2, SPREAD, 512).clip(1, 250).astype(int)
    queries = [" ".join(rng.choice(words, QUERY_WORDS)) for _ in range(2000)]
    return [" ".join(rng.choice(words, length)) for length in lengths], queries


def _parse(option: str) -> tuple[str, str, str]:
    """The name and the two values of an option.

    Raises:
        BadParameter: It does not have this form.
    """
    name, _, values = option.partition("=")
    first, comma, second = values.rpartition(",")
    if not comma:
        raise typer.BadParameter(
            f"is {option!r}; must be a name, an equals sign, and two values with a comma"
        )
    return name, first, second


@contextmanager
def _library(work: Path, python: str, backend: str, folder: str) -> Iterator[Embed]:
    """A library in a process of its own; see `encoder_process`."""
    program = [python, "-P", str(Path(encoder_process.__file__)), backend, folder]
    texts_file, embeddings_file = work / "texts.json", work / "embeddings.npy"
    process: Any = subprocess.Popen(  # noqa: S603 - named by the user
        program, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )

    def read_line() -> str:
        if line := process.stdout.readline():
            return str(line)
        raise RuntimeError(f"{backend} in {python} ended; see above")

    def embed(texts: Sequence[str], size: int) -> tuple[float, Embeddings]:
        texts_file.write_text(json.dumps(texts))
        process.stdin.write(f"{texts_file} {size} {embeddings_file}\n")
        process.stdin.flush()
        return float(read_line()), np.load(embeddings_file)

    with process:  # leaving it closes standard input, which ends the program
        read_line()  # it is ready
        yield embed


def _post(url: SplitResult, model: str, texts: Sequence[str], size: int) -> tuple[float, Embeddings]:
    """Embeds texts over one connection, call by call."""
    connection, rows = http.client.HTTPConnection(url.netloc, timeout=600), list[Embeddings]()
    started = time.perf_counter()
    for at in range(0, len(texts), size):
        body = json.dumps({"model": model, "input": texts[at : at + size], "encoding_format": "base64"})
        connection.request("POST", url.path, body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        answer: Any = json.loads(response.read())
        if response.status != http.HTTPStatus.OK:
            raise RuntimeError(f"{url.netloc}: {answer}")
        rows += [np.frombuffer(base64.b64decode(item["embedding"]), np.float32) for item in answer["data"]]
    seconds = time.perf_counter() - started
    connection.close()
    return seconds, np.stack(rows)


def compare(ways: Mapping[str, Embed], calls: Mapping[str, tuple[Sequence[str], int]], rounds: int) -> str:
    """A table of texts per second, with the ratio to the first way and the smallest cosine with it."""
    cells: dict[str, list[str]] = {name: [] for name in ways}
    smallest: dict[str, float] = dict.fromkeys(ways, 1.0)
    for texts, size in calls.values():
        warm = {name: embed(texts, size)[1] for name, embed in ways.items()}
        first = next(iter(warm.values()))
        times = [[embed(texts, size)[0] for embed in ways.values()] for _ in range(rounds)]
        for name, seconds in zip(ways, np.transpose(times), strict=True):
            ratio = median(np.transpose(times)[0] / seconds)
            cells[name].append(f"{text(len(texts) / median(seconds))} ({ratio:.2f})")
            smallest[name] = min(smallest[name], float(cosines(warm[name], first).min()))
    rows = [(name, *figures, f"{smallest[name]:.4f}") for name, figures in cells.items()]
    return table(("way", *calls, "smallest cosine"), rows)


def compare_singles(ways: Mapping[str, Callable[[int], tuple[float, float]]], rounds: int) -> str:
    """A table of queries per second with 32 callers, and of the median milliseconds of one caller."""
    results = [[(ask(CALLERS)[0], 1000 * ask(1)[1]) for ask in ways.values()] for _ in range(rounds)]
    medians = np.median(results, axis=0)  # (ways, 2)
    rows = [(name, text(rate), f"{alone:.1f}") for name, (rate, alone) in zip(ways, medians, strict=True)]
    return table(("way", f"{CALLERS} callers, queries/s", "one caller, median ms"), rows)


def _singles(url: SplitResult, model: str, queries: Sequence[str], callers: int) -> tuple[float, float]:
    """Queries per second of so many callers over HTTP, and the median seconds of a call."""
    bodies = [json.dumps({"model": model, "input": query, "encoding_format": "base64"}) for query in queries]
    head = f"POST {url.path} HTTP/1.1\r\nHost: {url.netloc}\r\nContent-Type: application/json\r\n"
    messages = [f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode() for body in bodies]
    requests = itertools.cycle(messages)

    async def call(until: float) -> list[float]:
        times = []
        reader, writer = await asyncio.open_connection(url.hostname, url.port)
        while (started := time.perf_counter()) < until:
            writer.write(next(requests))
            lines = (await reader.readuntil(b"\r\n\r\n")).lower().split(b"\r\n")
            if b" 200 " not in lines[0]:
                raise RuntimeError(f"{url.netloc}: {lines[0].decode()}")
            (length,) = (int(line.split(b":")[1]) for line in lines if line.startswith(b"content-length"))
            await reader.readexactly(length)
            times.append(time.perf_counter() - started)
        writer.close()
        return times

    async def load(seconds: float) -> list[float]:
        times = await asyncio.gather(*[call(time.perf_counter() + seconds) for _ in range(callers)])
        return [*itertools.chain(*times)]

    asyncio.run(load(WARM_SECONDS))
    times = asyncio.run(load(SECONDS))
    return len(times) / SECONDS, median(times)


def _grpc_singles(target: str, model: str, queries: Sequence[str], callers: int) -> tuple[float, float]:
    """The same over attention.v1."""
    options: Any = {"model_name": model, "embedding": pb.EmbeddingOptions()}
    messages = [pb.AttendRequest(text=pb.TextSequences(texts=[query]), **options) for query in queries]
    requests = [EncodedRequest(message.SerializeToString(), 1, 1) for message in messages]
    caller = UnaryCaller(target, METHODS[Api.ATTENTION], requests)
    result = measure(caller, 0, callers, MeasurementWindow(SECONDS, WARM_SECONDS))
    if result.failures:
        raise RuntimeError(f"{result.failures} calls failed")
    return result.sequences / result.seconds, float(np.median(result.latencies)) / 1e9


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, context_settings={"help_option_names": ["-h", "--help"]})
    app.command()(read_help(main))
    app()

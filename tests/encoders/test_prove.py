"""`attention-client prove` judges right servers and wrong ones; behind each is the real library."""

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import quote, unquote

import numpy as np
import pytest
import torch
from attention_client._commands.app import app
from sentence_transformers import CrossEncoder, SentenceTransformer
from typer.testing import CliRunner

from attention_serving.artifact.golden import write_golden_arrays
from attention_serving.artifact.manifest import GraphKind, Manifest
from scripts.local_server import ServerProcess
from tests.encoders import classifiers
from tests.encoders.repository import SENTENCE, SETTINGS
from tests.support import encoders
from tests.support.processes import run_python

PROMPTS = {"prompts": {"query": "query: ", "document": "text: "}, "default_prompt_name": "query"}
TOKEN = "secret"  # noqa: S105 - of this test
Rows = Callable[..., Any]
Change = Callable[[Any], object]


def embed(
    change: Change = lambda _: None, after: Callable[[Any], Any] = lambda rows: rows, **options: Any
) -> Rows:
    """Embeddings of a changed model of the library, of all texts in one batch."""

    def rows(folder: Path) -> Rows:
        model = SentenceTransformer(str(folder), device="cpu")
        change(model)
        return lambda texts, **prompt: after(
            model.encode(texts, batch_size=64, **options | prompt).astype(np.float64)
        )

    return rows


def put(path: Callable[[Any], Any], name: str, value: Any) -> Change:
    return lambda model: setattr(path(model), name, value)


def pool(mode: str) -> Change:
    return put(lambda model: model[1], "pooling_mode", mode)


def cut(most: int) -> Change:
    return put(lambda model: model, "max_seq_length", most)


def read(name: str, value: Any) -> Change:
    return put(lambda model: model.tokenizer, name, value)


def shorten(rows: Any) -> Any:
    return rows[:, :16] / np.linalg.norm(rows[:, :16], axis=1, keepdims=True)


# What a server does otherwise, and the cause that is named first.
ENCODERS: dict[str, tuple[Any, str]] = {
    "cls": (embed(pool("cls")), "pooling is cls rather than mean"),
    "two causes": (
        embed(pool("max"), prompt=""),
        "pooling is max rather than mean, and the prompt is missing",
    ),
    "no prompt": (embed(prompt=""), "the prompt is missing"),
    "another prompt": (embed(prompt_name="document"), "the prompt 'document' is put before texts"),
    "cut": (embed(cut(128)), "texts are cut to 128 tokens rather than 160"),
    "cut elsewhere": (embed(cut(101)), "texts are cut to 101 tokens rather than 160"),
    "left": (embed(read("truncation_side", "left")), "long texts are cut at their beginning"),
    "fp16": (embed(torch.nn.Module.half), "precision is float16"),
    "bf16": (embed(torch.nn.Module.bfloat16), "precision is bfloat16"),
    "padding": (embed(read("padding_side", "left")), "a batch is padded on the wrong side"),
    "swapped": (embed(after=lambda rows: rows[::-1]), "results of a batch are in another order"),
    "raw": (embed(lambda model: model.pop(2)), "embeddings are not normalised"),
    "decimals": (embed(after=lambda rows: rows.round(3)), "numbers have 3 decimals"),
    "integers": (embed(after=lambda rows: np.rint(rows * 127)), "embeddings are integers"),
    "narrow": (embed(after=shorten), "rows have 16 elements rather than 32"),
    "NaN": (embed(after=lambda rows: rows * np.nan), "answers have NaN or infinity"),
    "other": (embed(after=lambda rows: np.sin(99 * rows)), "another model, or something unknown"),
}


def score(change: Callable[[Any], Any] = lambda pair: pair, **options: Any) -> Any:
    def rows(folder: Path) -> Rows:
        model = CrossEncoder(str(folder), device="cpu")
        return lambda pairs: model.predict([*map(change, pairs)], **options)

    return rows


RERANKERS: dict[str, tuple[Any, str]] = {
    "logits": (score(activation_fn=torch.nn.Identity()), "scores are logits, without the activation"),
    "swapped pair": (score(lambda pair: pair[::-1]), "query and text are swapped"),
}


class Handler(BaseHTTPRequestHandler):
    """The protocols, below a path with the name of a function of rows."""

    servers: ClassVar[dict[str, Rows]] = {}
    busy: ClassVar[list[int]] = []

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self.reply(200, {"data": [{"id": "only"}], "model_id": "only"})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        _, name, *_, method = unquote(self.path).split("/")
        texts = body.get("input") or body.get("inputs") or body.get("texts") or body.get("documents")
        is_busy = name == "busy" and not self.busy
        self.busy.extend([1] * is_busy)
        is_locked = name == "locked" and self.headers["Authorization"] != "Bearer secret"
        if status := is_locked * 401 or is_busy * 503 or (name == "refusing" and "" in texts) * 422:
            return self.reply(status, {"error": "refused"})
        if method == "tokenize":
            return self.reply(200, [[{"id": 3}]])
        pairs = [(body["query"], text) for text in texts] if method == "rerank" else texts
        prompt = body.get("prompt_name") or {"search_document": "document"}.get(body.get("input_type"))
        options = {"prompt_name": prompt} if prompt and name != "ignoring" else {}
        rows = self.servers[name if name in self.servers else "right"](pairs, **options).tolist()
        if method == "predict":
            labels = classifiers.LABELS[classifiers.CLASSIFIER]
            scores = [[{"label": label, "score": row[at]} for at, label in enumerate(labels)] for row in rows]
            return self.reply(200, [row[::-1] for row in scores])
        if method == "rerank":
            name = "score" if "texts" in body else "relevance_score"
            entries = [{"index": at, name: row} for at, row in enumerate(rows)][::-1]
            return self.reply(200, entries if "texts" in body else {"results": entries})
        data = [{"index": at, "embedding": row} for at, row in enumerate(rows)][::-1]
        forms = {"inputs": rows, "texts": {"embeddings": {"float": rows}}, "input": {"data": data}}
        return self.reply(200, next(form for member, form in forms.items() if member in body))

    def reply(self, status: int, value: Any) -> None:
        content = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Retry-After", "0")
        self.end_headers()
        self.wfile.write(content)


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    prompts = {"query": "query: ", "document": "a text: "}
    settings = {**SETTINGS, "prompts": prompts, "default_prompt_name": "query"}
    return encoders.save_sentence_model("bert", tmp_path_factory.mktemp("bert"), settings=settings)


def save_classifier(name: str, folder: Path) -> Path:
    classifiers.library_model(name).save_pretrained(folder)
    encoders.save_tokenizer(classifiers.tokenizer_of(name), folder)
    return folder


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_classifier(classifiers.RERANKER, tmp_path_factory.mktemp("reranker"))


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def prove(*arguments: object) -> tuple[int, dict[str, Any]]:
    done = CliRunner().invoke(app, ["prove", *map(str, arguments), "--json"])
    assert done.stdout, done.output
    return done.exit_code, json.loads(done.stdout)


# One of each kind of cause; the others take a minute together.
QUICK = ("two causes", "cut elsewhere", "fp16", "swapped", "raw", "NaN")


@pytest.mark.parametrize(
    "name",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.thorough) for name in ENCODERS],
)
def test_the_cause_of_wrong_embeddings(name: str, encoder: Path, url: str) -> None:
    Handler.servers[name] = ENCODERS[name][0](encoder)
    status, report = prove(encoder, "--openai", f"{url}/{quote(name)}/v1")
    assert status == 1, report
    causes = ENCODERS[name][1].split(", and ")
    assert {*report["causes"][: len(causes)]} == {*causes}, report


@pytest.mark.parametrize("name", RERANKERS)
def test_the_cause_of_wrong_scores(name: str, reranker: Path, url: str) -> None:
    Handler.servers[name] = RERANKERS[name][0](reranker)
    status, report = prove(reranker, "--cohere", f"{url}/{quote(name)}")
    assert (status, report["causes"][0]) == (1, RERANKERS[name][1]), report


@pytest.mark.parametrize("kind", ["openai", "tei", "cohere"])
def test_a_right_server_is_equal(kind: str, encoder: Path, reranker: Path, url: str) -> None:
    for folder, rows in ((reranker, score()), (encoder, embed())):
        Handler.servers["right"] = rows(folder)
        status, report = prove(folder, f"--{kind}", f"{url}/right")
        assert (status, report["causes"]) == (0, []), report


def test_a_classifier_has_the_scores_of_its_labels(url: str, tmp_path: Path) -> None:
    folder = save_classifier(classifiers.CLASSIFIER, tmp_path)
    Handler.servers["right"] = score()(folder)
    status, report = prove(folder, "--tei", f"{url}/right")
    assert (status, report["causes"]) == (0, []), report


def test_refusals_prompts_keys_and_reports(encoder: Path, url: str, tmp_path: Path) -> None:
    Handler.servers["right"] = embed()(encoder)
    status, report = prove(encoder, "--openai", f"{url}/refusing", "--report", tmp_path)
    assert (status, len(report["refused"])) == (0, 1)
    assert json.loads((tmp_path / "prove.json").read_text()) == report
    assert (tmp_path / "prove.md").read_text().startswith(f"# {report['verdict']}\n")
    report = prove(encoder, "--tei", f"{url}/ignoring")[1]
    assert report["causes"] == ["the prompt 'document' of requests is ignored"]
    assert prove(encoder, "--openai", f"{url}/busy")[0] == 0
    assert prove(encoder, "--openai", f"{url}/locked", "--token", "secret")[0] == 0
    status, report = prove(encoder, "--openai", f"{url}/locked")
    assert (status, "answered 401" in report["verdict"]) == (2, True)
    assert prove(encoder, "--openai", "http://127.0.0.1:9")[0] == 2
    assert prove(tmp_path, "--openai", url)[0] == 2
    assert CliRunner().invoke(app, ["prove", str(encoder)]).exit_code == 2


def test_this_service_is_equal(server: ServerProcess, sentence_repository: Path, tmp_path: Path) -> None:
    folder = encoders.save_sentence_model(
        "bert", tmp_path, settings={**SETTINGS, "default_prompt_name": None}
    )
    status, report = prove(folder, "--grpc", server.target, "--model", SENTENCE)
    assert (status, report["prompts"], report["refused"]) == (0, {"query": "equal"}, {}), report
    assert prove(folder, "--openai", f"http://127.0.0.1:{server.http_port}/v1", "--model", SENTENCE)[0] == 0
    artifact = sentence_repository / SENTENCE / "1"  # in a process, because tritonclient may be imported here
    done = run_python("-m", "attention_client", "prove", "--artifact", artifact, "--grpc", server.target)
    assert (done.returncode, done.stdout.startswith("# equal: ")) == (0, True), done
    write_golden_arrays(artifact, Manifest.load(artifact), GraphKind.PLAIN, tmp_path)
    exact = {"name": SENTENCE, "tolerance": {"rtol": 0, "atol": 1e-12}}
    (tmp_path / "manifest.json").write_text(json.dumps(exact))
    done = run_python("-m", "attention_client", "prove", "--artifact", tmp_path, "--grpc", server.target)
    assert (done.returncode, done.stdout.startswith("# not equal: ")) == (1, True), done


def test_without_the_extra_the_command_names_it() -> None:
    hidden = "import sys; sys.modules['sentence_transformers'] = None"
    code = f"{hidden}; from attention_client.cli import main; main()"
    done = run_python("-c", code, "prove", ".", "--openai", "http://127.0.0.1:9")
    assert (done.returncode, "its extra 'prove'" in done.stdout) == (2, True), done

"""Tokenize, Detokenize and requests without a model's name, at a server of an encoder and a classifier."""

import re
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import grpc
import pytest
from tokenizers import Tokenizer

from attention_serving.protos.attention.v1 import attention_pb2 as pb
from attention_serving.protos.attention.v1.attention_pb2_grpc import AttentionServiceStub
from attention_serving.server.engine.limits import Limits
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.run.provider import Device
from tests.encoders.classifiers import CLASSIFIER, CLASSIFIERS, RERANKER, TOKENS, tokenizer_of
from tests.encoders.repository import SENTENCE
from tests.encoders.texts import TEXTS
from tests.server.samples import load_repository
from tests.server.seams import PATIENCE_SECONDS, Served
from tests.support import encoders
from tests.support.artifacts import cached_repositories

LONG = "人生 dessert " * 200
PAIR: dict[str, Any] = {"texts": ["eat", LONG], "pairs": [LONG, "eat"]}


@pytest.fixture(scope="module")
def models(sentence_repository: Path) -> dict[str, LoadedModel]:
    folders = [sentence_repository, *cached_repositories(CLASSIFIERS)]
    loaded = (model for folder in folders for model in load_repository(folder, Device(threads=1)))
    return {model.name: model for model in loaded if isinstance(model, LoadedModel)}


@pytest.fixture(scope="module")
def stub(models: dict[str, LoadedModel]) -> Iterator[Any]:
    limits = Limits(max_text_bytes=10_000, max_result_bytes=200_000)
    with Served(models[SENTENCE], models[RERANKER], limits=limits) as served:
        yield AttentionServiceStub(served.channel)


def call(stub: Any, request: Any) -> Any:
    method = type(request).__name__.removesuffix("Request")
    return getattr(stub, method)(request, timeout=PATIENCE_SECONDS)


def cut(tokenizer: Tokenizer, side: str) -> Tokenizer:
    tokenizer.enable_truncation(TOKENS, direction=side)
    return tokenizer


@pytest.mark.parametrize("omits", [False, True])
def test_tokens_are_those_of_the_library(stub: Any, omits: bool) -> None:
    texts = [*TEXTS[:2], *TEXTS[3:], LONG]
    text = pb.TextSequences(texts=texts, input_kind=pb.INPUT_KIND_QUERY)
    reply = call(stub, pb.TokenizeRequest(text=text, omit_special_tokens=omits))
    library, prompt = encoders.tokenizer_of("bert"), "query: "
    expected = [library.encode(prompt + text, add_special_tokens=not omits) for text in texts]
    assert (reply.model_name, reply.model_version) == (SENTENCE, "1")
    assert [*reply.token_ids.ids] == [token_id for each in expected for token_id in each.ids]
    assert [*reply.token_ids.lengths] == [*reply.token_offsets.lengths] == [len(each) for each in expected]
    assert [*reply.special] == [bool(mark) for each in expected for mark in each.special_tokens_mask]
    bounds = [(max(0, a - 7), max(0, b - 7)) for each in expected for a, b in each.offsets]
    assert [*zip(reply.token_offsets.starts, reply.token_offsets.ends, strict=True)] == bounds
    tokens = [library.decode([token_id]) or library.id_to_token(token_id) for token_id in expected[0].ids]
    assert [*reply.tokens[: len(tokens)]] == tokens


@pytest.mark.parametrize("side", ["right", "left"])
def test_pairs_are_cut_on_a_side_if_the_request_says_so(stub: Any, side: str) -> None:
    number = pb.TruncationSide.Value(f"TRUNCATION_SIDE_{side.upper()}")
    text = pb.TextSequences(**PAIR, truncate=True, truncation_side=number)
    reply = call(stub, pb.TokenizeRequest(model_name=RERANKER, text=text))
    library = cut(tokenizer_of(RERANKER), side)
    expected = [library.encode(*pair) for pair in zip(*PAIR.values(), strict=True)]
    assert [*reply.token_ids.ids] == [token_id for each in expected for token_id in each.ids]
    assert (reply.HasField("token_offsets"), [*reply.truncated]) == (False, [0, 1])
    text.truncate = False
    assert len(call(stub, pb.TokenizeRequest(model_name=RERANKER, text=text)).token_ids.ids) > 4 * TOKENS


def test_token_ids_become_texts_again(stub: Any) -> None:
    library = encoders.tokenizer_of("bert")
    rows = [library.encode(text).ids for text in TEXTS]
    ids = pb.TokenSequences(ids=chain.from_iterable(rows), lengths=map(len, rows))
    for keeps in (False, True):
        reply = call(stub, pb.DetokenizeRequest(token_ids=ids, keep_special_tokens=keeps))
        assert [*reply.texts] == [library.decode(row, skip_special_tokens=not keeps) for row in rows]
    assert (reply.model_name, reply.model_version) == (SENTENCE, "1")


def tokenize(**text: Any) -> pb.TokenizeRequest:
    return pb.TokenizeRequest(text=pb.TextSequences(**text))


def detokenize(lengths: list[int], ids: list[int]) -> pb.DetokenizeRequest:
    return pb.DetokenizeRequest(token_ids=pb.TokenSequences(lengths=lengths, ids=ids))


@pytest.mark.parametrize(
    ("request_message", "words"),
    [
        (tokenize(), "text: has no texts; at least one is required"),
        (tokenize(texts=["a"] * 5000), "text: contains 5000 sequences; the limit is 4096"),
        (tokenize(texts=["a" * 20_000]), "text: text 0 has 20000 bytes; the limit is 10000"),
        (tokenize(texts=["a " * 4000] * 4), "text: texts 0 to 2 have 24006 tokens; the limit of one request"),
        (tokenize(texts=["a " * 4000] * 2), "text: the response would have"),
        (tokenize(texts=["a"], pairs=["b"]), "pairs: model 'sentence' is not a text classifier"),
        (tokenize(texts=["a"], prompt="query", input_kind=2), "input_kind: cannot be combined with prompt"),
        (tokenize(texts=["a"], input_kind=9), "input_kind: is 9; must be one of query, document, classif"),
        (tokenize(texts=["a"], truncation_side=9), "truncation_side: is 9; must be one of right, left"),
        (detokenize([1, 0], [5]), "token_ids: has an empty sequence, or none"),
        (detokenize([2], [5]), "token_ids.ids: has 1 ids; the lengths sum to 2"),
        (detokenize([1], [-1]), "token_ids: contains id -1, which no token has"),
        (detokenize([10**5], [5] * 10**5), "token_ids: the response would have"),
        (detokenize([2], [5, 2**40]), f"token_ids: contains id {2**40}, which no token has"),
    ],
)
def test_what_cannot_be_tokenized_is_refused(stub: Any, request_message: Any, words: str) -> None:
    with pytest.raises(grpc.RpcError, match=f'details = "{re.escape(words)}'):
        call(stub, request_message)


NONE = "model_name: is required: {} are ready; send the name of one, or the header model-id over HTTP"
EMBED, CLASSIFY = {"embedding": pb.EmbeddingOptions()}, {"text": pb.TextSequences(return_labels=True)}
TOKENIZE: dict[str, Any] = {}


@pytest.mark.parametrize(
    ("names", "default", "asked", "model"),
    [
        ((SENTENCE, CLASSIFIER), "", EMBED, SENTENCE),
        ((SENTENCE, CLASSIFIER), "", CLASSIFY, CLASSIFIER),
        ((SENTENCE, CLASSIFIER), CLASSIFIER, EMBED, SENTENCE),  # the default model is of another kind
        ((SENTENCE, CLASSIFIER), CLASSIFIER, TOKENIZE, CLASSIFIER),
        ((CLASSIFIER, RERANKER), "org/topics", CLASSIFY, CLASSIFIER),
        ((CLASSIFIER,), "", TOKENIZE, CLASSIFIER),
        ((CLASSIFIER, RERANKER), "", CLASSIFY, NONE.format("2 text classifiers")),
        ((CLASSIFIER, RERANKER), "", TOKENIZE, NONE.format("2 text classifiers")),
        ((CLASSIFIER,), "", EMBED, NONE.format("0 text encoders")),
        ((SENTENCE,), "later", EMBED, "model 'later' does not exist"),
    ],
)
def test_the_model_of_a_request_without_a_name(
    models: dict[str, LoadedModel], names: tuple[str, ...], default: str, asked: dict[str, Any], model: str
) -> None:
    kind = pb.AttendRequest if asked else pb.TokenizeRequest
    request = kind(**asked)
    request.text.texts.append("eat")
    chosen = [models[name] for name in names]
    with Served(*chosen, alias="org/topics=topics", model_id=default) as served:
        stub = AttentionServiceStub(served.channel)
        if model in models:
            assert call(stub, request).model_name == model
        else:
            with pytest.raises(grpc.RpcError, match=f'details = "{re.escape(model)}'):
                call(stub, request)

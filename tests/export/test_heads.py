"""Sparse and multi-vector encoders as modules and artifacts: against the library, and what is refused."""

import json
import shutil
import string
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose, assert_array_equal
from safetensors.torch import load_file, save_file
from sentence_transformers import MultiVectorEncoder, SparseEncoder
from torch import Tensor

from attention_serving.artifact.encoder import (
    SPARSE_EMBEDDING,
    TOKEN_WEIGHTS,
    LateInteractionFacts,
    QueryFacts,
    SparseFacts,
    has_vectors,
    tolerance_of,
)
from attention_serving.artifact.golden import QUERY_TEXT, load_golden, token_inputs
from attention_serving.artifact.manifest import Manifest
from attention_serving.artifact.names import ModelId
from attention_serving.artifact.tolerance import Tolerance
from attention_serving.export.artifact import write_artifact
from attention_serving.export.encoder import encoder_spec
from attention_serving.export.errors import ExportError
from attention_serving.export.options import Reference
from attention_serving.export.parity import has_same_top
from attention_serving.export.precision import ENCODER_TOLERANCES, Precision
from attention_serving.export.reference import TEXTS, compare_texts
from attention_serving.model.checkpoints import CheckpointError
from attention_serving.model.checkpoints.files import read_json
from attention_serving.model.text_folders import load_encoder
from tests.encoders.heads import (
    COLBERT,
    INFERENCE_FREE,
    M3,
    MAX_TOKENS,
    MULTI_VECTOR,
    POSITIONS,
    SPARSE,
    SPLADE,
    save_folder,
)
from tests.encoders.repository import FURTHER_HEAD_MODELS, HEAD_MODELS, HEADS
from tests.support.artifacts import cached_repositories, edit_json

RTOL, ATOL = 1e-4, 2e-5
NAMES = [
    pytest.param(name, marks=() if name in HEADS else pytest.mark.thorough)
    for name in (*SPARSE, *MULTI_VECTOR, M3)
]
# Of one and of many tokens, so that their batch is padded.
BATCH = [TEXTS[4], "a", TEXTS[-1], "life, the universe."]
LONG = "word " * 200
Change = Callable[[Path], Any]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Makes each folder once."""
    base = tmp_path_factory.mktemp("heads")
    return lambda name: base / name if (base / name).exists() else save_folder(name, base / name)


def manifest_of(name: str) -> tuple[Path, Manifest]:
    """An exported model."""
    (repository,) = cached_repositories(HEAD_MODELS if name in HEADS else FURTHER_HEAD_MODELS)
    return repository / name / "1", Manifest.load(repository / name / "1")


@pytest.mark.parametrize("name", NAMES)
def test_a_padded_batch_equals_the_library(folder_of: Callable[[str], Path], name: str) -> None:
    encoder = load_encoder(folder_of(name))
    spec = encoder_spec(encoder, reference=Reference.NONE)
    assert spec.encoder is not None
    assert encoder.supports_padding
    for kind in ("document", "query") if encoder.head == "tokens" else ("document",):
        encoded = [encoder.library.preprocess([text], task=kind) for text in BATCH]
        sequences = [inputs["input_ids"][0] for inputs in encoded]
        if encoder.hidden_token is not None and kind == "query":
            sequences = [
                ids.masked_fill(inputs["attention_mask"][0] == 0, encoder.token_bound - 1)
                for ids, inputs in zip(sequences, encoded, strict=True)
            ]
        lengths = torch.tensor(list(map(len, sequences)))
        with torch.inference_mode():
            padded = torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True)
            results, rows, _, weights = encoder(padded, lengths, return_tokens=encoder.head == "dense")
            options = {} if name == M3 else {"task": kind}
            expected = list(encoder.library.encode(BATCH, prompt="", batch_size=1, **options))
        for index, (ids, vectors) in enumerate(zip(sequences, expected, strict=True)):
            result = results[index]
            if encoder.head == "tokens":
                assert spec.encoder.late_interaction is not None
                result = result[: len(ids)][has_vectors(ids.numpy(), spec.encoder.late_interaction, kind)]
                assert not results[index, len(ids) :].any()
            elif encoder.head == "sparse":
                vectors = vectors.to_dense()  # noqa: PLW2901
                largest = result.abs().sort().values[-(encoder.library.max_active_dims or 0)]
                result = (
                    result.where(result.abs() >= largest, 0) if encoder.library.max_active_dims else result
                )
            else:
                assert_heads(encoder, ids, rows[index], weights[index])
            assert_allclose(result, vectors, rtol=RTOL, atol=ATOL)


def assert_heads(encoder: Any, ids: Tensor, rows: Tensor, weights: Tensor) -> None:
    """The heads of BGE-M3 are those of the paper: relu(w h), and the normalised projection of h."""
    with torch.inference_mode():
        hidden = encoder.library[0].auto_model(input_ids=ids[None]).last_hidden_state[0]
    sparse, colbert = encoder.token_heads["sparse"], encoder.token_heads["colbert"]
    expected = (hidden @ sparse.weight[0] + sparse.bias).clamp(min=0)
    vectors = hidden @ colbert.weight.T + colbert.bias
    assert_allclose(weights[: len(ids)], expected, rtol=RTOL, atol=ATOL)
    assert_allclose(rows[: len(ids)], vectors / vectors.norm(dim=-1, keepdim=True), rtol=RTOL, atol=ATOL)
    assert not rows[len(ids) :].any()
    assert not weights[len(ids) :].any()


@pytest.mark.parametrize("name", NAMES)
def test_an_artifact_states_its_heads_and_is_proven_from_texts(name: str) -> None:
    artifact, manifest = manifest_of(name)
    facts = manifest.encoder
    assert facts is not None
    has_kinds = name in MULTI_VECTOR or name == INFERENCE_FREE
    report = json.loads((artifact / manifest.parity_report).read_bytes())
    # Without special tokens, some texts have no tokens as queries.
    assert report["texts"]["count"] == {False: 64, True: 126 if name == INFERENCE_FREE else 128}[has_kinds]
    assert report["texts"]["min_cosine"] > 0.999999
    assert ("nearest" in report) == (name == M3)
    queries = [case for case in load_golden(artifact / manifest.golden) if QUERY_TEXT in case.inputs]
    assert len(queries) == 12 * has_kinds
    outputs = {str(kind): [spec.name for spec in graph.outputs] for kind, graph in manifest.graphs.items()}
    result = "embedding" if name == M3 else SPARSE_EMBEDDING if name in SPARSE else "context_vectors"
    assert outputs["plain"] == outputs["lengths"] == outputs["blocks"] == [result]
    assert outputs.get("query") == ([TOKEN_WEIGHTS] if name == INFERENCE_FREE else None)
    assert outputs.get("tokens") == ([result, "context_vectors", TOKEN_WEIGHTS] if name == M3 else None)
    assert (facts.embedding_width > 0, bool(facts.pooling)) == (name == M3, name == M3)


def test_the_facts_are_those_of_the_folder(folder_of: Callable[[str], Path]) -> None:
    (_, splade), (_, colbert), (_, m3) = (manifest_of(name) for name in (SPLADE, COLBERT, M3))
    tokenizer = load_encoder(folder_of(COLBERT)).tokenizer
    skipped = tuple(sorted(tokenizer.get_vocab()[mark] for mark in string.punctuation))
    assert splade.encoder is not None
    assert colbert.encoder is not None
    assert m3.encoder is not None
    width = tokenizer.get_vocab_size()
    assert (splade.encoder.sparse, splade.encoder.late_interaction) == (SparseFacts(width=width), None)
    assert colbert.encoder.late_interaction == LateInteractionFacts(similarity="maxsim", skipped_ids=skipped)
    assert colbert.encoder.query == QueryFacts(expansion_id=width, expanded_length=32)
    assert colbert.encoder.token_limits == {"query": 32, "document": 100}
    assert colbert.graphs["plain"].inputs[0].exclusive_upper_bound == width + 1  # type: ignore[index]
    assert (colbert.encoder.prompts, colbert.max_lengths) == (
        {"query": "[Q] ", "document": "[D] "},
        {"query_length": MAX_TOKENS},
    )
    assert m3.encoder.sparse is not None
    assert m3.encoder.sparse.hidden_ids == (0, 1, 2, 3)
    assert m3.encoder.late_interaction == LateInteractionFacts(similarity="meanmaxsim", skips_first=True)
    # Logits of all token ids, twice, are held at a time.
    assert splade.encoder.row_elements - m3.encoder.row_elements == 2 * width


def test_facts_that_are_wrong_end_the_export(folder_of: Callable[[str], Path]) -> None:
    encoder = load_encoder(folder_of(COLBERT))
    facts = encoder_spec(encoder, reference=Reference.NONE).encoder
    assert facts is not None
    changes: list[tuple[dict[str, Any], str]] = [
        ({"late_interaction": LateInteractionFacts(similarity="maxsim")}, "vectors of other tokens"),
        ({"query": QueryFacts(expansion_id=4, expanded_length=32)}, "the library"),
        ({"token_limits": {"query": 31, "document": 100}}, "the library"),
    ]
    for change, message in changes:
        with pytest.raises(ExportError, match=message):
            compare_texts(encoder, facts.model_copy(update=change))
    with pytest.raises(ExportError, match="has only dense embeddings"):
        encoder_spec(encoder, reference=Reference.TRANSFORMERS)
    with pytest.raises(ValueError, match="dimensions=8: the folder has no dense embeddings"):
        encoder_spec(encoder, dimensions=(8,))


def drop_weights(prefix: str) -> Change:
    """Removes weights of a file."""

    def change(folder: Path) -> None:
        weights = load_file(path := folder / "model.safetensors")
        kept = {name: tensor for name, tensor in weights.items() if not name.startswith(prefix)}
        assert len(kept) < len(weights)
        save_file(kept, path, {"format": "pt"})

    return change


def set_members(file: str, **members: object) -> Change:
    """Sets members of a JSON file."""
    return lambda folder: edit_json(folder / file, lambda content: content.update(members))


def change_modules(change: Callable[[list[dict[str, Any]]], Any]) -> Change:
    """Changes the list of modules."""
    return lambda folder: edit_json(folder / "modules.json", change)


def add_pooling(folder: Path) -> None:
    kind = "sentence_transformers.multi_vector_encoder.modules.token_pooling.HierarchicalTokenPooling"
    (folder / "pool").mkdir()
    (folder / "pool/config.json").write_text('{"pool_factor": 2}')
    change_modules(lambda modules: modules.append({"idx": 4, "name": "4", "path": "pool", "type": kind}))(
        folder
    )


SETTINGS, MODEL = "config_sentence_transformers.json", "sentence_bert_config.json"
REFUSED: dict[str, tuple[str, Change, str]] = {
    "a head without weights": (
        SPLADE,
        drop_weights("cls.predictions.transform"),
        "the weights lack cls.pred",
    ),
    "a tied head": (
        SPLADE,
        drop_weights("bert.embeddings.word"),
        "lack bert.*cls.predictions.decoder.weight",
    ),
    "a head that is not tied": (
        SPLADE,
        set_members("config.json", tie_word_embeddings=False),
        "decoder.weight",
    ),
    "another task": (SPLADE, set_members(MODEL, transformer_task="feature-extraction"), "after feature-extr"),
    "another type": (SPLADE, set_members(SETTINGS, model_type="Other"), "model_type 'Other' is not"),
    "token pooling": (COLBERT, add_pooling, "HierarchicalTokenPooling; a multi-vector"),
    "no mask": (COLBERT, change_modules(lambda modules: modules.pop(2)), "has one MultiVectorMask"),
    "kept ids": (COLBERT, set_members("2_MultiVectorMask/config.json", keep_only_token_ids=[5]), "keep_only"),
    "documents beyond the table of positions": (
        COLBERT,
        set_members(MODEL, document_length=POSITIONS + 1),
        f"takes {POSITIONS} tokens, but texts of a kind may have {POSITIONS + 1}",
    ),
    "one file of two": (
        M3,
        lambda folder: (folder / "sparse_linear.pt").unlink(),
        "sparse_linear.pt: must be a file",
    ),
    "another shape": (
        M3,
        lambda folder: torch.save({"weight": torch.ones(2, 32)}, folder / "sparse_linear.pt"),
        r"must be a file of two tensors: weight \[1, 32\] and bias",
    ),
    "code in a file": (
        M3,
        lambda folder: torch.save({"weight": Path()}, folder / "colbert_linear.pt"),
        "colbert_linear.pt: must be a file of two tensors",
    ),
    "other routes": (
        INFERENCE_FREE,
        set_members("router_config.json", parameters={"default_route": "query"}),
        "of which query is the default",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_folders_that_cannot_be_served_are_refused(
    folder_of: Callable[[str], Path], tmp_path: Path, case: str
) -> None:
    name, change, message = REFUSED[case]
    folder = shutil.copytree(folder_of(name), tmp_path / "folder")
    change(folder)
    with pytest.raises(CheckpointError, match=message):
        load_encoder(folder)


def longer_documents(folder: Path) -> None:
    """Documents may be longer, and queries as long, as a text of no kind."""
    set_members(MODEL, query_length=None, document_length=MAX_TOKENS + 20)(folder)


def longer_queries(folder: Path) -> None:
    """Queries may be longer than documents: the two have their own tokenizers."""
    (folder_of_queries, *_) = read_json(folder / "router_config.json")["structure"]["query"]
    set_members(f"{folder_of_queries}/tokenizer_config.json", model_max_length=MAX_TOKENS + 20)(folder)


@pytest.mark.parametrize(
    ("name", "change", "limits"),
    [
        ("mean-colbert", longer_documents, {"": MAX_TOKENS, "query": MAX_TOKENS}),
        (INFERENCE_FREE, longer_queries, {"": MAX_TOKENS, "document": MAX_TOKENS}),
    ],
)
def test_each_kind_of_texts_is_cut_where_the_library_cuts_it(
    folder_of: Callable[[str], Path], tmp_path: Path, name: str, change: Change, limits: dict[str, int]
) -> None:
    folder = shutil.copytree(folder_of(name), tmp_path / "folder")
    change(folder)
    encoder = load_encoder(folder)
    facts = encoder_spec(encoder, reference=Reference.NONE).encoder
    assert facts is not None
    assert (facts.token_limits, encoder.max_tokens) == (limits, MAX_TOKENS + 20)
    library = (SparseEncoder if name in SPARSE else MultiVectorEncoder)(str(folder), device="cpu")
    encode = token_inputs(encoder.tokenizer, ["token_ids"], encoder.max_tokens, facts)
    for kind in ("query", "document"):
        ids = library.preprocess([LONG], task=kind)["input_ids"]
        assert_array_equal(encode(LONG, is_query=kind == "query")["token_ids"], ids)
    assert library.preprocess([LONG])["input_ids"].shape == (1, limits[""])


def make_pylate(folder: Path) -> None:
    """As PyLate saves a model: masks and markers of kinds are settings."""
    change_modules(lambda modules: modules.__delitem__(slice(2, None)))(folder)
    change_modules(lambda modules: modules[1].update(type="pylate.models.Dense.Dense"))(folder)
    set_members(MODEL, query_expansion=None, document_length=None)(folder)
    settings = {
        "query_prefix": "<mask> ",
        "document_prefix": "<unk> ",
        "query_length": 32,
        "document_length": 100,
    }
    edit_json(folder / MODEL, lambda content: content.clear() or content.update(max_seq_length=99))
    (folder / SETTINGS).write_text(json.dumps({"model_type": "ColBERT", **settings}))


def make_stanford(folder: Path) -> None:
    """As the authors of ColBERT save a model: one file of weights, and metadata."""
    weights = {f"bert.{name}": tensor for name, tensor in load_file(folder / "model.safetensors").items()}
    weights["linear.weight"] = load_file(folder / "1_Dense/model.safetensors")["linear.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    set_members("config.json", architectures=["HF_ColBERT"])(folder)
    for file in ("modules.json", SETTINGS, MODEL):
        (folder / file).unlink()
    metadata = {"query_token_id": "<mask>", "doc_token_id": "<unk>", "doc_maxlen": 100, "query_maxlen": 32}
    (folder / "artifact.metadata").write_text(json.dumps(metadata))


@pytest.mark.thorough
@pytest.mark.parametrize("change", [make_pylate, make_stanford])
def test_earlier_forms_of_folders_are_the_same_model(
    folder_of: Callable[[str], Path], tmp_path: Path, change: Change
) -> None:
    folder = shutil.copytree(folder_of(COLBERT), tmp_path / "folder")
    change(folder)
    facts = encoder_spec(load_encoder(folder)).encoder  # compares ids and vectors of tokens
    (_, manifest) = manifest_of(COLBERT)
    assert facts is not None
    assert manifest.encoder is not None
    assert facts.prompts == {"query": "<mask> ", "document": "<unk> "}
    assert (facts.query, facts.late_interaction) == (
        manifest.encoder.query,
        manifest.encoder.late_interaction,
    )


@pytest.mark.thorough
@pytest.mark.parametrize("name", [SPLADE, COLBERT, INFERENCE_FREE, M3])
def test_each_head_passes_by_its_rule_in_8_bits(
    folder_of: Callable[[str], Path], tmp_path: Path, name: str
) -> None:
    spec = encoder_spec(load_encoder(folder_of(name)))
    artifact, manifest = write_artifact(spec, ModelId(name), tmp_path, precision=Precision.INT8)
    report = json.loads((artifact / manifest.parity_report).read_bytes())
    assert 0.97 < report["texts"]["min_cosine"] < 0.999999


def test_rules_of_sparse_embeddings() -> None:
    int8 = ENCODER_TOLERANCES[Precision.INT8]
    assert tolerance_of(SPARSE_EMBEDDING, [], int8) == int8
    assert not tolerance_of(TOKEN_WEIGHTS, [], int8).holds(np.array([[0.3]]), np.array([[0.0]]))
    assert tolerance_of(TOKEN_WEIGHTS, [], int8).holds(np.array([[0.05]]), np.array([[0.0]]))
    compare = partial(has_same_top, tolerance=Tolerance(rtol=0, atol=1e-3))
    eager = np.zeros((2, 20), np.float32)
    eager[:, :11] = np.arange(11, 0, -1)
    swapped = eager[:, [*range(9), 10, 9, *range(11, 20)]]
    assert compare(eager, eager)
    assert not compare(swapped, eager)
    eager[:, 10] = eager[:, 9] - 5e-4  # too close to tell apart
    assert compare(eager[:, [*range(9), 10, 9, *range(11, 20)]], eager)

"""Compares whole text encoders with the libraries that people use them with: from characters to vectors."""

import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.metadata import version
from itertools import chain, islice, pairwise, zip_longest
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

import numpy as np
import torch
from torch import nn

from attention_serving.artifact.encoder import (
    CONTEXT_VECTORS,
    EMBEDDING,
    LOGITS,
    SCORES,
    SPARSE_EMBEDDING,
    TOKEN_WEIGHTS,
    ClassifierFacts,
    EncoderFacts,
    has_vectors,
)
from attention_serving.artifact.golden import Arrays, GoldenCase, text_inputs, token_inputs
from attention_serving.artifact.manifest import GraphKind
from attention_serving.export.errors import ExportError
from attention_serving.export.options import Reference
from attention_serving.export.pair_templates import SPECIAL
from attention_serving.model.text_encoder import TextClassifier, TextEncoder

# How many texts are compared, and the largest number of tokens of those that are embedded.
TEXT_COUNT: Final = 64
PROMPT_TEXT_COUNT: Final = 8
MOST_TOKENS: Final = 512
BATCH, OWN_TOKENS = 8, 6
# Texts of one kind and another: case, spaces, accents, scripts, directions, emoji, signs, code, long words.
TEXTS: Final[list[str]] = json.loads(Path(__file__).with_name("reference_texts.json").read_bytes())


Kind: TypeAlias = Literal["query", "document"] | None
Comparison = tuple[Sequence[GoldenCase], str]


def compare_texts(
    encoder: TextEncoder, facts: EncoderFacts, reference: Reference | None = None
) -> Comparison:
    """Compares the token ids of texts with the library's, and embeds the texts with the reference.

    Where queries are other token ids than documents, all texts are compared as both.

    Args:
        encoder: The encoder; its tokenizer is the one that will be served.
        facts: What its manifest will state.
        reference: Default: that of the kind of the folder.

    Returns:
        A case for each text that the reference embeds, its text and the output for it (1, ...); and the name
        and version of the reference. Both are empty without a reference.

    Raises:
        ExportError: The token ids of a text differ, or which of its tokens have vectors.
    """
    if reference is None:
        is_plain = encoder.library is None
        reference = Reference.TRANSFORMERS if is_plain else Reference.SENTENCE_TRANSFORMERS
    if reference is Reference.TRANSFORMERS and encoder.head != "dense":
        raise ExportError(
            "--reference transformers has only dense embeddings, which the folder does not have"
        )
    encode = token_inputs(encoder.tokenizer, ["token_ids"], encoder.max_tokens, facts)
    has_kinds = encoder.head == "tokens" or encoder.query_weights is not None
    by_kind = [
        _compare_kind(encoder, facts, reference, encode, kind)
        for kind in (("document", "query") if has_kinds else (None,))
    ]
    cases = [case for pair in zip_longest(*by_kind) for case in pair if case is not None]
    return cases, "" if reference is Reference.NONE else f"{reference} {version(reference)}"


def _compare_kind(
    encoder: TextEncoder, facts: EncoderFacts, reference: Reference, encode: Callable[..., Arrays], kind: Kind
) -> list[GoldenCase]:
    """Compares the texts as those of one kind; see `compare_texts`."""
    texts, is_query = [*_texts(encoder)], kind == "query"
    encode = partial(encode, is_query=is_query)
    served = [_check_ids(encode, text, theirs=[_library_ids(encoder, text, kind)])[0] for text in texts]
    if reference is Reference.NONE:
        return []
    embedded = {text: ids for text, ids in zip(texts, served, strict=True) if 0 < len(ids) <= MOST_TOKENS}
    embed = _embed if reference is Reference.TRANSFORMERS else _encode
    graph = GraphKind.QUERY if is_query and encoder.query_weights is not None else GraphKind.PLAIN
    # Padding on the left moves the positions of models that count them from the first token of a batch. To
    # the weights of token ids, padding is a token.
    reader = encoder.reader
    pads = encoder.supports_padding and reader.pad_token is not None and reader.padding_side == "right"
    size, short = BATCH if pads and graph is GraphKind.PLAIN else 1, [*embedded]
    batches = (short[at : at + size] for at in range(0, len(short), size))
    rows = [row for batch in batches for row in embed(encoder, facts, batch, kind)]
    return [
        GoldenCase(graph, text_inputs(text, is_query=is_query), _outputs(facts, row, ids, kind))
        for (text, ids), row in zip(embedded.items(), rows, strict=True)
    ]


def _outputs(facts: EncoderFacts, row: Any, ids: list[int], kind: Kind) -> Arrays:
    """The outputs of a graph that make what the library returned for a text with token ids, as one of a kind.

    Raises:
        ExportError: The library returned something that the graph and the facts do not make.
    """
    if facts.embedding_width:
        return {EMBEDDING: row[np.newaxis]}
    if facts.late_interaction is not None:
        count, is_kept = len(ids), has_vectors(np.array(ids), facts.late_interaction, kind or "")
        if not np.array_equal(row["attention_mask"][:count].bool().numpy(), is_kept):
            raise ExportError(f"the library has vectors of other tokens of the token ids {str(ids)[:100]}")
        return {CONTEXT_VECTORS: row["token_embeddings"][np.newaxis, :count].numpy()}
    if kind != "query":
        return {SPARSE_EMBEDDING: row[np.newaxis]}
    if not set(np.flatnonzero(row)) <= set(ids):
        raise ExportError(f"the library weighs other token ids of a query than {str(ids)[:100]}")
    return {TOKEN_WEIGHTS: row[np.newaxis, ids]}


def compare_pairs(
    classifier: TextClassifier, facts: ClassifierFacts, reference: Reference | None = None
) -> Comparison:
    """Compares token ids and types of texts and of pairs with the library's, and scores them with it.

    Pairs have the default prompt; the ids of some are compared with each prompt.

    Args:
        classifier: The classifier; its tokenizer is the one that will be served.
        facts: Its prompts and templates.
        reference: As for `compare_texts`, as are results and errors.
    """
    short, long = TEXTS[4], TEXTS[-1] * 40
    pairs: list[tuple[str, ...]] = [(long, short), (short, long), *zip(TEXTS[4:], TEXTS[14:], strict=False)]
    if facts.templates:
        pairs += [(token, f" {token}too") for token in classifier.reader.all_special_tokens]
        pairs += pairwise(SPECIAL)
    names, single = ["token_ids", "token_types"], [] if facts.templates else [(text,) for text in TEXTS[1:]]
    for prompt in {facts.default_prompt, *facts.prompts, ""}:
        count = TEXT_COUNT if prompt == facts.default_prompt else PROMPT_TEXT_COUNT
        encode = token_inputs(classifier.tokenizer, names, classifier.max_tokens, facts, prompt)
        for texts in [*pairs, *single][:count]:
            _check_ids(encode, *texts, theirs=_library_pair(classifier, facts.prompts.get(prompt, ""), texts))
    if reference is Reference.NONE:
        return (), ""
    functions = {"softmax": nn.Softmax(dim=-1), "sigmoid": nn.Sigmoid(), "identity": nn.Identity()}
    activate = functions[classifier.activation]
    scores = classifier.library.predict(
        pairs,
        activation_fn=lambda logits: torch.stack([activate(logits), logits], dim=1),
        show_progress_bar=False,
        batch_size=1,
    )
    names = [SCORES] if classifier.activation == "identity" else [SCORES, LOGITS]
    rows = np.asarray(scores, np.float32).reshape(len(pairs), 2, 1, -1)
    cases = [
        GoldenCase(GraphKind.PLAIN, text_inputs(*texts), dict(zip(names, row, strict=False)))
        for texts, row in zip(pairs, rows, strict=True)
    ]
    library = Reference.SENTENCE_TRANSFORMERS
    return cases, f"{library} {version(library)}"


def _library_pair(classifier: TextClassifier, prompt: str, texts: tuple[str, ...]) -> list[list[int]]:
    """The ids of a text or a pair, and their types if the model takes them, as the library makes them."""
    (item,) = texts if len(texts) == 1 else (texts,)
    features = classifier.library.preprocess([item], prompt=prompt)
    return [features[name][0].tolist() for name in ("input_ids", "token_type_ids") if name in features]


def _texts(encoder: TextEncoder) -> Iterator[str]:
    """The fixed texts, and those that an encoder's own tokens, prompts and length make."""
    reader, prompts = encoder.reader, {} if encoder.library is None else encoder.library.prompts
    tokens = [*reader.all_special_tokens, *reader.get_added_vocab()][:OWN_TOKENS]
    specific = [f"{token} is a token, {token}too" for token in tokens]
    specific += [f"{prompt}Life is short" for prompt in prompts.values() if prompt]
    if most := encoder.max_tokens:
        specific += [" ".join(["word"] * count) for count in (most - 3, most - 2, most - 1, most, 2 * most)]
    joined = (f"{first} {second}" for first, second in zip(TEXTS[4:], TEXTS[14:], strict=False))
    yield from islice(dict.fromkeys(chain(TEXTS, specific, joined)), TEXT_COUNT)


def _check_ids(encode: Callable[..., Arrays], *texts: str, theirs: list[list[int]]) -> list[list[int]]:
    """The ids, and types, of a text or a pair, as they will be served, if they are the library's."""
    excerpt = " | ".join(texts)[:60]
    try:
        ours: list[list[int]] = [array[0].tolist() for array in encode(*texts).values()]
    except Exception as error:  # the library does not raise a narrower type
        raise ExportError(f"the tokenizer, as the library reads it, refuses {excerpt!r}: {error}") from error
    if ours[: len(theirs)] != theirs:
        raise ExportError(
            f"the tokenizer that would be served gives {excerpt!r} the ids {str(ours)[:100]}, the library "
            f"{str(theirs)[:100]}. tokenizer.json cannot say a setting of tokenizer_config.json: save the "
            f"tokenizer again, or remove the setting"
        )
    return ours


def _library_ids(encoder: TextEncoder, text: str, kind: Kind) -> list[int]:
    """The token ids of a text as one of a kind; those that others do not attend to are the last id."""
    if encoder.library is not None:
        inputs = encoder.library.preprocess([text], **({"task": kind} if kind else {}))
        ids = inputs["input_ids"][0]
        if "query_expansion_positions" in inputs:
            added = inputs["query_expansion_positions"][0] & (inputs["attention_mask"][0] == 0)
            ids = ids.masked_fill(added, encoder.token_bound - 1)
        return list(map(int, ids))
    return list(encoder.reader(text, truncation=encoder.max_tokens is not None)["input_ids"])


def _encode(encoder: TextEncoder, facts: EncoderFacts, texts: Sequence[str], kind: Kind) -> Any:
    library = encoder.library
    if library is None:
        raise ExportError("--reference sentence-transformers needs a folder that it wrote, with modules.json")
    options: dict[str, Any] = {"task": kind} if kind else {}
    if encoder.head == "tokens":  # with the vectors that are skipped
        options["output_value"] = None
    if facts.sparse is not None and encoder.head == "sparse":  # with all weights
        options |= {"max_active_dims": facts.sparse.width, "convert_to_sparse_tensor": False}
    embeddings = library.encode(list(texts), prompt="", show_progress_bar=False, **options)
    return embeddings.numpy() if encoder.head == "sparse" else embeddings


@torch.inference_mode()
def _embed(encoder: TextEncoder, _facts: EncoderFacts, texts: Sequence[str], _kind: Kind) -> Any:
    options: dict[str, Any] = {"padding": len(texts) > 1, "truncation": encoder.max_tokens is not None}
    if encoder.padded_length:
        options |= {"padding": "max_length", "max_length": encoder.padded_length}
    inputs = encoder.reader(list(texts), return_tensors="pt", **options)
    mask = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"]))
    if encoder.padded_length:
        inputs.pop("attention_mask", None)
    return encoder.pool(encoder.model(**inputs), inputs["input_ids"], mask).numpy()

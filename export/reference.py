"""Compares whole text encoders with the libraries that people use them with: from characters to vectors."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from itertools import chain, islice
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from attention_serving.artifact.golden import GoldenCase, text_inputs, token_inputs
from attention_serving.artifact.manifest import GraphKind
from attention_serving.export.errors import ExportError
from attention_serving.export.options import Reference
from attention_serving.model.text_encoder import TextClassifier, TextEncoder

# How many texts are compared, and the largest number of tokens of those that are embedded.
TEXT_COUNT: Final = 64
MOST_TOKENS: Final = 512
BATCH, OWN_TOKENS = 8, 6
# Texts of one kind and another: case, spaces, accents, scripts, directions, emoji, signs, code, long words.
TEXTS: Final[list[str]] = json.loads(Path(__file__).with_name("reference_texts.json").read_bytes())


@dataclass(frozen=True)
class Compared:
    """What a reference computes.

    Attributes:
        cases: One for each text that the reference embeds: its text, and the output for it (1, d).
        reference: Name and version of the reference; empty if there is none.
    """

    cases: Sequence[GoldenCase] = ()
    reference: str = ""


def compared(encoder: TextEncoder, reference: Reference | None = None) -> Compared:
    """Compares the token ids of texts with the library's, and embeds the texts with the reference.

    Args:
        encoder: The encoder; its tokenizer is the one that will be served.
        reference: Default: that of the kind of the folder.

    Raises:
        ExportError: The token ids of a text differ.
    """
    texts = [*_texts(encoder)]
    served = [_checked_ids(encoder, text) for text in texts]
    if reference is None:
        is_plain = encoder.library is None
        reference = Reference.TRANSFORMERS if is_plain else Reference.SENTENCE_TRANSFORMERS
    if reference is Reference.NONE:
        return Compared()
    embedded = [text for text, ids in zip(texts, served, strict=True) if 0 < len(ids) <= MOST_TOKENS]
    embed = _embed if reference is Reference.TRANSFORMERS else _encode
    # Padding on the left moves the positions of models that count them from the first token of a batch.
    pads = encoder.mixes and encoder.reader.pad_token is not None and encoder.reader.padding_side == "right"
    size = BATCH if pads else 1
    rows = [row for at in range(0, len(embedded), size) for row in embed(encoder, embedded[at : at + size])]
    cases = [
        GoldenCase(GraphKind.PLAIN, text_inputs(text), {"embedding": row[np.newaxis]})
        for text, row in zip(embedded, rows, strict=True)
    ]
    return Compared(cases, f"{reference} {version(reference)}")


def compared_pairs(classifier: TextClassifier, reference: Reference | None = None) -> Compared:
    """Compares token ids and types of texts and of pairs with the library's, and scores them with it.

    Arguments and errors are those of `compared`.
    """
    names = ["token_ids", "token_types"]
    served = token_inputs(classifier.tokenizer, names, classifier.max_tokens)
    short, long = TEXTS[4], TEXTS[-1] * 40
    pairs = [(long, short), (short, long), *zip(TEXTS[4:], TEXTS[14:], strict=False)]
    given = [*pairs, *((text,) for text in TEXTS[1:])][:TEXT_COUNT]
    for texts in given:
        ours = [own[0].tolist() for own in served(*texts).values()]
        found = classifier.reader(*texts, truncation=classifier.max_tokens is not None)
        theirs = [list(found["input_ids"]), list(found.get("token_type_ids", ours[1]))]
        _check_ids(" | ".join(texts), ours, theirs)
    if reference is Reference.NONE:
        return Compared()
    library, used = classifier.library, [texts for texts in given if len(texts) > 1]
    activation = torch.nn.Softmax(dim=-1) if classifier.activation == "softmax" else library.activation_fn
    if classifier.activation == "sigmoid":
        activation = torch.nn.Sigmoid()
    scores = library.predict(used, activation_fn=activation, show_progress_bar=False, batch_size=1)
    rows = np.asarray(scores, np.float32).reshape(len(used), 1, -1)
    cases = [
        GoldenCase(GraphKind.PLAIN, text_inputs(*texts), {"scores": row})
        for texts, row in zip(used, rows, strict=True)
    ]
    return Compared(cases, f"{Reference.SENTENCE_TRANSFORMERS} {version(Reference.SENTENCE_TRANSFORMERS)}")


def _check_ids(text: str, ours: Any, theirs: Any) -> None:
    """Refuses a tokenizer that does not give a text the library's ids."""
    if ours != theirs:
        raise ExportError(
            f"the tokenizer that would be served gives {text[:60]!r} the ids {str(ours)[:100]}, the library "
            f"{str(theirs)[:100]}. tokenizer.json cannot say a setting of tokenizer_config.json: save the "
            f"tokenizer again, or remove the setting"
        )


def _texts(encoder: TextEncoder) -> Iterator[str]:
    """The fixed texts, and those that an encoder's own tokens, prompts and length make."""
    reader, prompts = encoder.reader, {} if encoder.library is None else encoder.library.prompts
    tokens = [*reader.all_special_tokens, *reader.get_added_vocab()][:OWN_TOKENS]
    own = [f"{token} is a token, {token}too" for token in tokens]
    own += [f"{prompt}Life is short" for prompt in prompts.values() if prompt]
    if most := encoder.max_tokens:
        own += [" ".join(["word"] * count) for count in (most - 3, most - 2, most - 1, most, 2 * most)]
    joined = (f"{first} {second}" for first, second in zip(TEXTS[4:], TEXTS[14:], strict=False))
    yield from islice(dict.fromkeys(chain(TEXTS, own, joined)), TEXT_COUNT)


def _checked_ids(encoder: TextEncoder, text: str) -> list[int]:
    """The ids of a text, cut as the server cuts it, which are the library's."""
    try:
        found = token_inputs(encoder.tokenizer, ["token_ids"], encoder.max_tokens)(text)
    except Exception as error:  # the library does not raise a narrower type
        raise ExportError(
            f"the tokenizer, as the library reads it, refuses {text[:60]!r}: {error}"
        ) from error
    ids: list[int] = found["token_ids"][0].tolist()
    _check_ids(text, ids, _library_ids(encoder, text))
    return ids


def _library_ids(encoder: TextEncoder, text: str) -> list[int]:
    if encoder.library is not None:
        found = encoder.library.preprocess([text])["input_ids"][0]
        return [int(each) for each in found]
    return list(encoder.reader(text, truncation=encoder.max_tokens is not None)["input_ids"])


def _encode(encoder: TextEncoder, texts: Sequence[str]) -> Any:
    library = encoder.library
    if library is None:
        raise ExportError("--reference sentence-transformers needs a folder that it wrote, with modules.json")
    return library.encode(list(texts), prompt="", show_progress_bar=False)


@torch.inference_mode()
def _embed(encoder: TextEncoder, texts: Sequence[str]) -> Any:
    options: dict[str, Any] = {"padding": len(texts) > 1, "truncation": encoder.max_tokens is not None}
    if encoder.padded_length:
        options |= {"padding": "max_length", "max_length": encoder.padded_length}
    given = encoder.reader(list(texts), return_tensors="pt", **options)
    mask = given.get("attention_mask", torch.ones_like(given["input_ids"]))
    if encoder.padded_length:
        given.pop("attention_mask", None)
    return encoder.pooled(encoder.model(**given), given["input_ids"], mask).numpy()

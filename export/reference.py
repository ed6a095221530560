"""Compares whole text encoders with the libraries that people use them with: from characters to vectors."""

import json
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import nn

from attention_serving.artifact.encoder import LOGITS, SCORES, ClassifierFacts
from attention_serving.artifact.golden import Arrays, GoldenCase, pair_inputs, text_inputs, token_inputs
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


Comparison = tuple[Sequence[GoldenCase], str]


def compare_texts(encoder: TextEncoder, reference: Reference | None = None) -> Comparison:
    """Compares the token ids of texts with the library's, and embeds the texts with the reference.

    Args:
        encoder: The encoder; its tokenizer is the one that will be served.
        reference: Default: that of the kind of the folder.

    Returns:
        A case for each text that the reference embeds, its text and the output for it (1, d); and the name
        and version of the reference. Both are empty without a reference.

    Raises:
        ExportError: The token ids of a text differ.
    """
    texts = [*_texts(encoder)]
    side = encoder.reader.truncation_side
    encode = token_inputs(encoder.tokenizer, ["token_ids"], encoder.max_tokens, side)
    served = [_check_ids(encode, text, theirs=[_library_ids(encoder, text)])[0] for text in texts]
    if reference is None:
        is_plain = encoder.library is None
        reference = Reference.TRANSFORMERS if is_plain else Reference.SENTENCE_TRANSFORMERS
    if reference is Reference.NONE:
        return (), ""
    embedded = [text for text, ids in zip(texts, served, strict=True) if 0 < len(ids) <= MOST_TOKENS]
    embed = _embed if reference is Reference.TRANSFORMERS else _encode
    # Padding on the left moves the positions of models that count them from the first token of a batch.
    reader = encoder.reader
    pads = encoder.supports_padding and reader.pad_token is not None and reader.padding_side == "right"
    size = BATCH if pads else 1
    rows = [row for at in range(0, len(embedded), size) for row in embed(encoder, embedded[at : at + size])]
    cases = [
        GoldenCase(GraphKind.PLAIN, text_inputs(text), {"embedding": row[np.newaxis]})
        for text, row in zip(embedded, rows, strict=True)
    ]
    return cases, f"{reference} {version(reference)}"


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
        encode = pair_inputs(classifier.tokenizer, names, classifier.max_tokens, facts, prompt)
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


def _library_ids(encoder: TextEncoder, text: str) -> list[int]:
    if encoder.library is not None:
        return list(map(int, encoder.library.preprocess([text])["input_ids"][0]))
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
    inputs = encoder.reader(list(texts), return_tensors="pt", **options)
    mask = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"]))
    if encoder.padded_length:
        inputs.pop("attention_mask", None)
    return encoder.pool(encoder.model(**inputs), inputs["input_ids"], mask).numpy()

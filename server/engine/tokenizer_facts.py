"""What follows from the parts of a tokenizer, as its serialized form lists them."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

SPACE = " "
BYTES = range(256)
# Pre-tokenizers that never join what is before a space to what follows the space.
SPLITS_AT_SPACES = ("Whitespace", "WhitespaceSplit", "BertPreTokenizer", "ByteLevel", "Metaspace")
# Normalizers that change what is before a space without regard to what follows the space.
KEEPS_SPACES = (
    "BertNormalizer", "Lowercase", "NFC", "NFD", "NFKC", "NFKD", "Nmt", "Precompiled", "Prepend", "Strip",
    "StripAccents",
)  # fmt: skip
Part = Mapping[str, Any]


def ends_words_at_spaces(tokenizer: Tokenizer) -> bool:
    """Whether the tokens before a space that follows another character are the same for every continuation.

    Then a part of a text that ends there has no more tokens than the text. False if that is not certain.
    """
    parts: Part = json.loads(tokenizer.to_str())
    first = next(_steps(parts["pre_tokenizer"], "pretokenizers"), None)
    return (
        first is not None
        and first["type"] in SPLITS_AT_SPACES
        and first.get("use_regex", True)
        and first.get("split", True)
        and all(_keeps_spaces(step) for step in _steps(parts["normalizer"], "normalizers"))
        and not any(SPACE in token["content"] for token in parts["added_tokens"])
    )


def _steps(part: Part | None, key: str) -> Iterator[Part]:
    """A pre-tokenizer or normalizer, or those of a sequence, in their order."""
    if part is not None and part["type"] == "Sequence":
        for inner in part[key]:
            yield from _steps(inner, key)
    elif part is not None:
        yield part


def _keeps_spaces(normalizer: Part) -> bool:
    if normalizer["type"] == "Replace":
        pattern: str | None = normalizer["pattern"].get("String")
        return pattern is not None and pattern != "" and SPACE not in pattern
    return normalizer["type"] in KEEPS_SPACES


def drops_unknown(tokenizer: Tokenizer) -> bool:
    """Whether the tokenizer may drop characters without a token, instead of raising an error.

    Of the tokenizer models only BPE does, unless it has an unknown token or a token for every byte.
    """
    model = tokenizer.model
    return isinstance(model, BPE) and model.unk_token is None and not _has_every_byte(tokenizer, model)


def _has_every_byte(tokenizer: Tokenizer, model: BPE) -> bool:
    if model.continuing_subword_prefix or model.end_of_word_suffix:
        return False
    if model.byte_fallback and all(model.token_to_id(f"<0x{byte:02X}>") is not None for byte in BYTES):
        return True
    steps = _steps(json.loads(tokenizer.to_str())["pre_tokenizer"], "pretokenizers")
    return any(step["type"] == "ByteLevel" for step in steps) and all(
        model.token_to_id(character) is not None for character in ByteLevel.alphabet()
    )

"""The tokenizer of a folder, and what else is stated about it."""

import json
from pathlib import Path
from typing import Any, Final

from tokenizers import Tokenizer
from tokenizers.normalizers import Lowercase, Sequence

from attention_serving.model.checkpoints import CheckpointError
from attention_serving.model.checkpoints.files import read_json

FILE: Final = "tokenizer.json"
CONFIGURATION: Final = "tokenizer_config.json"
# Members of the configuration, and the same of the normalizer in tokenizer.json.
BERT_OPTIONS: Final = {
    "do_lower_case": "lowercase",
    "strip_accents": "strip_accents",
    "tokenize_chinese_chars": "handle_chinese_chars",
}


def load_tokenizer(folder: Path, *, lowercases: bool, vocabulary: int) -> Tokenizer:
    """Reads tokenizer.json.

    Args:
        folder: The folder of the model.
        lowercases: Whether texts are lowercased before.
        vocabulary: The number of token ids that the model has.

    Raises:
        CheckpointError: The file is missing, damaged or contradicts its configuration, or has ids that the
            model lacks.
    """
    path = folder / FILE
    if not path.exists():
        raise CheckpointError(f"{FILE} is missing; save the model with a fast tokenizer, which writes it")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library does not raise a narrower type
        raise CheckpointError(f"{FILE} cannot be read: {error}") from error
    _check_options(folder, tokenizer)
    highest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
    if highest >= vocabulary:
        raise CheckpointError(f"{FILE} has the id {highest}; the model has the ids 0 to {vocabulary - 1}")
    # What is served does neither: the server limits lengths, and pads batches itself.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if lowercases:
        own = [] if tokenizer.normalizer is None else [tokenizer.normalizer]
        tokenizer.normalizer = Sequence([Lowercase(), *own])
    return tokenizer


def stated_max_tokens(folder: Path) -> int:
    """The `model_max_length` of the configuration; 0 if there is none."""
    stated = _configuration(folder).get("model_max_length")
    if isinstance(stated, bool) or not isinstance(stated, int | float):
        return 0
    # The library writes 1e30 for tokenizers that state no length.
    return int(stated) if 0 < stated < 1e9 else 0  # noqa: PLR2004


def _configuration(folder: Path) -> dict[str, Any]:
    path = folder / CONFIGURATION
    found = read_json(path) if path.exists() else {}
    if not isinstance(found, dict):
        raise CheckpointError(f"{CONFIGURATION} must contain an object")
    if "auto_map" in found:
        raise CheckpointError(f"{CONFIGURATION}: auto_map names code, which is not run")
    return found


def _check_options(folder: Path, tokenizer: Tokenizer) -> None:
    """Refuses a configuration that would change the normalizer when the library loads the tokenizer."""
    stated = _configuration(folder)
    normalizer = json.loads(tokenizer.to_str())["normalizer"]
    if normalizer is None or normalizer.get("type") != "BertNormalizer":
        return
    for name, own in BERT_OPTIONS.items():
        if stated.get(name) is not None and stated[name] != normalizer[own]:
            raise CheckpointError(
                f"{CONFIGURATION}: {name}={stated[name]!r} contradicts {FILE}, which has {normalizer[own]!r}"
            )

"""A folder with a BERT of random weights, as sentence-transformers lays it out, and texts to encode."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer, normalizers, pre_tokenizers, processors
from tokenizers.models import WordPiece

LONGEST, MEAN_LENGTH, SPREAD = 512, 60, 0.7
NAMES = {name: f"[{name[:3].upper()}]" for name in ("pad_token", "unk_token", "cls_token", "sep_token")}
SPECIAL = tuple(NAMES.values())
# Heads of narrow models have 32 elements, as those of MiniLM; others have 64.
NARROW = 384
VOCABULARY = 30_522


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

"""Tiny text encoders of the transformers library with random weights, and what that library computes."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.processors import TemplateProcessing
from torch import Tensor, nn

VOCABULARY, WIDTH, HEADS, LAYERS, POSITIONS = 300, 32, 4, 3, 160
PADDING_ID = 1
SPECIAL = {"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3}
SIZES: Mapping[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "num_attention_heads": HEADS,
    "num_hidden_layers": LAYERS,
    "intermediate_size": 48,
    "max_position_embeddings": POSITIONS,
    "pad_token_id": PADDING_ID,
    "bos_token_id": 0,
    "eos_token_id": 2,
}
GROUPED: Mapping[str, Any] = {"num_key_value_heads": 2, "head_dim": 16}
# DistilBERT's own names of the sizes.
DISTILBERT: Mapping[str, Any] = {
    **{name: SIZES[name] for name in ("vocab_size", "max_position_embeddings", "pad_token_id")},
    "dim": WIDTH,
    "n_heads": HEADS,
    "n_layers": LAYERS,
    "hidden_dim": 48,
}
Model = Any  # the library's types say little of a model's parts


@dataclass(frozen=True)
class Case:
    """A model of one family.

    Attributes:
        name: The library's name of the family.
        options: Arguments of its configuration beside its sizes.
        max_tokens: The longest sequence that it takes.
        pooling: How our encoder pools its rows.
        model: What follows the family's name in that of the model.
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    sizes: Mapping[str, Any] = field(default_factory=lambda: SIZES)
    max_tokens: int = POSITIONS
    pooling: str = "mean"
    model: str = "Model"

    def make(self) -> Model:
        """The model in the library, with random weights."""
        config = getattr(transformers, f"{self.name}Config")(**{**self.sizes, **self.options})
        return getattr(transformers, f"{self.name}{self.model}")(config)


SHORTER = POSITIONS - PADDING_ID - 1
CASES: Mapping[str, Case] = {
    "bert": Case("Bert"),
    "roberta": Case("Roberta", max_tokens=SHORTER),
    "xlm-roberta": Case("XLMRoberta", max_tokens=SHORTER),
    "distilbert": Case("DistilBert", sizes=DISTILBERT),
    "mpnet": Case("MPNet", max_tokens=SHORTER),
    "modernbert": Case(
        "ModernBert", {"local_attention": 8, "cls_token_id": 0, "sep_token_id": 2, "layer_types": None}
    ),
    "qwen3": Case("Qwen3", GROUPED, pooling="last"),
    "qwen2": Case(
        "Qwen2",
        {"num_key_value_heads": 2, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
        pooling="last",
    ),
    "llama": Case("Llama", {"num_key_value_heads": 1}, pooling="last"),
    "mistral": Case("Mistral", {**GROUPED, "sliding_window": 6, "attention_dropout": 0.0}, pooling="last"),
    "clip_text_model": Case(
        "CLIPText",
        {"eos_token_id": VOCABULARY - 1, "projection_dim": 24},
        pooling="own",
        model="ModelWithProjection",
    ),
}


def make_model(name: str) -> Model:
    """A model of a family, with weights and biases of a size at which all of them count."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        model = CASES[name].make()
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.3)
    model.set_attn_implementation("eager")
    return model.eval()


def make_tokenizer(*, begin: bool = True, end: int = 2) -> Tokenizer:
    """A token for each byte of a text, between special tokens."""
    letters = {letter: len(SPECIAL) + index for index, letter in enumerate(sorted(ByteLevel.alphabet()))}
    vocabulary = {**SPECIAL, **letters}
    end_token = next((name for name, number in SPECIAL.items() if number == end), f"<{end}>")
    vocabulary[end_token] = end
    tokenizer = Tokenizer(BPE(vocabulary, []))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens([*SPECIAL, end_token])
    template = f"<s> $A {end_token}" if begin else f"$A {end_token}"
    specials = [("<s>", 0), (end_token, end)]
    tokenizer.post_processor = TemplateProcessing(single=template, special_tokens=specials)
    return tokenizer


def tokenizer_of(name: str) -> Tokenizer:
    """The tokenizer of a family's model."""
    causal = CASES[name].pooling == "last"
    return make_tokenizer(begin=not causal, end=VOCABULARY - 1 if name == "clip_text_model" else 2)


def save_model(name: str, folder: Path) -> Path:
    """A folder as Hugging Face lays it out."""
    folder.mkdir(parents=True, exist_ok=True)
    make_model(name).save_pretrained(folder)
    save_tokenizer(tokenizer_of(name), folder)
    return folder


def save_tokenizer(tokenizer: Tokenizer, folder: Path, **settings: object) -> None:
    """Saves a tokenizer, and what the library reads beside it."""
    tokenizer.save(str(folder / "tokenizer.json"))
    known = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<pad>"}
    write_json(folder / "tokenizer_config.json", known | settings)


def save_sentence_model(
    name: str,
    folder: Path,
    *,
    pooling: Mapping[str, object] | None = None,
    normalised: bool = True,
    settings: Mapping[str, object] | None = None,
    max_tokens: int | None = None,
) -> Path:
    """A folder as sentence-transformers lays it out."""
    save_model(name, folder)
    kinds = ["Transformer", "Pooling", *(["Normalize"] if normalised else [])]
    paths = ["", "1_Pooling", "2_Normalize"]
    modules = [
        {"idx": i, "name": str(i), "path": paths[i], "type": f"sentence_transformers.models.{kind}"}
        for i, kind in enumerate(kinds)
    ]
    write_json(folder / "modules.json", modules)
    pooled = {"word_embedding_dimension": WIDTH, **(pooling or {"pooling_mode_mean_tokens": True})}
    write_json(folder / "1_Pooling/config.json", pooled)
    lengths = {"max_seq_length": max_tokens or CASES[name].max_tokens, "do_lower_case": False}
    write_json(folder / "sentence_bert_config.json", lengths)
    if settings is not None:
        write_json(folder / "config_sentence_transformers.json", settings)
    return folder


def write_json(path: Path, value: object) -> None:
    """Writes a JSON file, and its folder if it does not exist."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))


@dataclass(frozen=True, eq=False)
class Expected:
    """What the library computes for one sequence: (d,), (T, d) and (L, H, T, T)."""

    embedding: Tensor
    tokens: Tensor
    weights: Tensor


def expected(
    name: str, model: Model, ids: Sequence[int], *, pooling: str = "", normalised: bool = False
) -> Expected:
    """The library's results for one sequence, pooled by formulas that are written out here."""
    with torch.inference_mode():
        found = model(input_ids=torch.tensor([ids]), output_attentions=True)
    tokens = found.last_hidden_state[0]
    pooling = pooling or CASES[name].pooling
    pooled = {
        "mean": lambda: tokens.sum(dim=0) / len(ids),
        "cls": lambda: tokens[0],
        "last": lambda: tokens[len(ids) - 1],
        "max": lambda: tokens.amax(dim=0),
        "mean_sqrt_length": lambda: tokens.sum(dim=0) / len(ids) ** 0.5,
        "weighted_mean": lambda: (
            (tokens * torch.arange(1, len(ids) + 1)[:, None]).sum(dim=0) / sum(range(1, len(ids) + 1))
        ),
        "own": lambda: found.text_embeds[0],
    }[pooling]()
    if normalised:
        pooled = F.normalize(pooled, dim=0)
    return Expected(pooled, tokens, torch.stack(found.attentions, dim=1)[0])


def random_ids(name: str, length: int, seed: int = 0) -> list[int]:
    """Token ids without the padding id, with the end token last where pooling looks for it."""
    rng = np.random.default_rng([seed, length])
    ids: list[int] = rng.integers(4, VOCABULARY - 1, length).tolist()
    if CASES[name].pooling == "own":
        ids[-1] = VOCABULARY - 1
    return ids

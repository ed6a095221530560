"""Causal rerankers with random weights, in folders as the libraries save them, and as artifacts."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.normalizers import Prepend, Replace
from tokenizers.normalizers import Sequence as Normalizers
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.processors import TemplateProcessing
from torch import nn

from attention_serving.artifact.names import ModelId
from attention_serving.export.artifact import write_artifact
from attention_serving.export.encoder import classifier_spec
from attention_serving.model.text_folders import load
from attention_serving.model.text_reranker import CausalReranker
from tests.support import encoders
from tests.support.artifacts import ModelSet

# The form of Qwen3-Reranker: an instruction as a system message, then query and document.
FLAT = """{% macro content(role) -%}
{{ messages | selectattr("role", "eq", role) | map(attribute="content") | first }}
{%- endmacro %}<s>system
Answer yes or no.</s>
<s>user
<Instruct>: {{ content("system") or "Relevant?" }}
<Query>: {{ content("query") }}
<Document>: {{ content("document") }}</s>
<s>assistant

"""
# Contents as lists of parts, and without the white space around them.
STRUCTURED = """<s>{% for message in messages %}{{ message.role }}: {{ message.content[0].text | trim }}
{% endfor %}Relevant?"""
PROMPTS = {"web": "Which passage answers the question?", "facts": "Is it \u00abtrue\u00bb?\n"}
ADDED = ["yes", "no"]
SIZES = {**encoders.SIZES, "vocab_size": 560, "num_hidden_layers": 2, "head_dim": 16, "sliding_window": None}


@dataclass(frozen=True)
class Reranker:
    """One folder.

    Attributes:
        kind: The library's name of the family.
        template: Its chat template; empty for none.
        tokens: Ids of the true and the false token.
        is_plain: Whether the folder is one of transformers, for which the library chooses these tokens.
        is_word_based: Whether the tokenizer marks the beginnings of words, as SentencePiece does.
    """

    kind: str
    template: str
    tokens: tuple[str, ...] = ("yes", "no")
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    activation: Any = field(default_factory=nn.Sigmoid)
    is_plain: bool = False
    is_word_based: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)


RERANKERS = {
    "yesno-qwen3": Reranker("Qwen3", FLAT, prompts=PROMPTS, default_prompt="web", activation=nn.Identity()),
    "yesno-llama": Reranker("Llama", "", prompts=PROMPTS, is_word_based=True),
    "yesno-qwen2": Reranker("Qwen2", STRUCTURED, tokens=("yes",)),
    "yesno-gemma": Reranker("Gemma", FLAT, is_plain=True, is_word_based=True),
}


def tokenizer_of(reranker: Reranker) -> Tokenizer:
    """A token for each byte and some merged ones, and tokens for yes and no."""
    if not reranker.is_word_based:
        letters = sorted(ByteLevel.alphabet())
        merges = [("\u010a", "\u010a"), ("\u0120", "a"), ("e", "a"), ("ea", "t")]
        vocabulary = [*encoders.SPECIAL, *letters, *map("".join, merges)]
        tokenizer = Tokenizer(BPE({token: at for at, token in enumerate(vocabulary)}, merges))
        tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    else:
        merges = [("\u2581", "a"), ("\u2581", "e"), ("a", "t"), ("\u2581e", "at")]
        letters = ["\u2581", *map(chr, range(33, 127)), *map("".join, merges)]
        vocabulary = [*encoders.SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *letters]
        tokens = {token: at for at, token in enumerate(vocabulary)}
        tokenizer = Tokenizer(BPE(tokens, merges, byte_fallback=True))
        tokenizer.normalizer = Normalizers([Prepend("\u2581"), Replace(" ", "\u2581")])
    tokenizer.add_special_tokens([*encoders.SPECIAL])
    tokenizer.add_tokens(ADDED)
    tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 0)]
    )
    return tokenizer


def save_reranker(reranker: Reranker, folder: Path, *, max_tokens: int = 160, **settings: object) -> Path:
    """A folder as `CrossEncoder.save_pretrained` writes it, or as transformers does."""
    from sentence_transformers import CrossEncoder  # noqa: PLC0415 - takes seconds
    from sentence_transformers.base.modules import Transformer  # noqa: PLC0415
    from sentence_transformers.cross_encoder.modules import LogitScore  # noqa: PLC0415

    with torch.random.fork_rng(devices=[]), TemporaryDirectory() as temporary:
        torch.manual_seed(11)
        options = {**SIZES, "num_key_value_heads": 2, **reranker.options}
        config = getattr(transformers, f"{reranker.kind}Config")(**options)
        model = getattr(transformers, f"{reranker.kind}ForCausalLM")(config)
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.3 if parameter.ndim > 1 else 0.5)
        plain = folder if reranker.is_plain else Path(temporary)
        model.save_pretrained(plain)
        more = {"model_max_length": max_tokens, "chat_template": reranker.template or None, **settings}
        encoders.save_tokenizer(tokenizer_of(reranker), plain, **more)
        if reranker.is_plain:
            return folder
        transformer = Transformer(str(plain), transformer_task="text-generation")
        ids = [transformer.tokenizer.convert_tokens_to_ids(token) for token in reranker.tokens]
        library = CrossEncoder(
            modules=[transformer, LogitScore(*ids)],
            prompts=dict(reranker.prompts),
            default_prompt_name=reranker.default_prompt,
            activation_fn=reranker.activation,
            device="cpu",
        )
        library.save_pretrained(str(folder))
    return folder


@cache
def library_model(name: str) -> Any:
    """A folder as the library reads it."""
    from sentence_transformers import CrossEncoder  # noqa: PLC0415 - takes seconds

    with TemporaryDirectory() as folder:
        return CrossEncoder(str(save_reranker(RERANKERS[name], Path(folder))), device="cpu")


def expected(
    name: str, *pairs: tuple[str, str], prompt: str | None = None, raw: bool = False
) -> NDArray[np.float32]:
    """What the library computes for each pair by itself, with a prompt by name: (B, 1)."""
    library = library_model(name)
    options: dict[str, Any] = {"activation_fn": nn.Identity()} if raw else {}
    if prompt is not None:
        options["prompt"] = library.prompts.get(prompt, "")
    scores = library.predict(list(pairs), batch_size=1, show_progress_bar=False, **options)
    return np.asarray(scores, np.float32).reshape(-1, 1)


def export_reranker(name: str, folder: Path) -> None:
    """One of RERANKERS as an artifact."""
    with TemporaryDirectory() as source:
        loaded = load(save_reranker(RERANKERS[name], Path(source)))
        assert isinstance(loaded, CausalReranker)
        write_artifact(classifier_spec(loaded), ModelId(name), folder)


SOURCES = [Path(__file__), Path(encoders.__file__)]
QWEN = "yesno-qwen3"
ONE_RERANKER = ModelSet("causal-reranker", [partial(export_reranker, QWEN)], SOURCES)
# Only tests with the marker `thorough` need these.
OTHER_RERANKERS = ModelSet(
    "causal-rerankers", [partial(export_reranker, name) for name in RERANKERS if name != QWEN], SOURCES
)

"""What sentence-transformers states beside a model: pooling, normalisation, prompts, lengths."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from attention_serving.model.checkpoints import CheckpointError
from attention_serving.model.checkpoints.files import read_json
from attention_serving.model.encoder.config import DenseConfig
from attention_serving.model.encoder_folder.fields import Fields

MODULES: Final = "modules.json"
SETTINGS: Final = "config_sentence_transformers.json"
LENGTHS: Final = "sentence_bert_config.json"
PACKAGE: Final = "sentence_transformers."
# The mode and the flag of a pooling configuration in the order in which their vectors are concatenated, and
# our names.
POOLINGS: Final = (
    ("cls", "cls_token", "cls"),
    ("max", "max_tokens", "max"),
    ("mean", "mean_tokens", "mean"),
    ("mean_sqrt_len_tokens", "mean_sqrt_len_tokens", "mean_sqrt_length"),
    ("weightedmean", "weightedmean_tokens", "weighted_mean"),
    ("lasttoken", "lasttoken", "last"),
)
# Functions of linear layers by the last part of their names.
DENSE_FUNCTIONS: Final = {"Identity": "identity", "Tanh": "tanh", "ReLU": "relu", "GELU": "gelu",
                          "SiLU": "silu"}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class SentenceModules:
    """What a folder states.

    Attributes:
        transformer: The folder of the model.
        pooling: Empty if the folder does not state it.
        pooled_width: Width of a token vector according to the pooling; 0 if it is not stated.
        dense: Linear layers after pooling, and the folders of their weights.
        normalised: Whether embeddings are divided by their length.
        max_tokens: Largest number of tokens; 0 if it is not stated.
        lowercases: Whether texts are lowercased before they are split into tokens.
        prompts: Texts that are put before a text, by name.
        default_prompt: Name of the prompt of a text that names none; empty for none.
    """

    transformer: Path
    pooling: tuple[str, ...] = ()
    pooled_width: int = 0
    dense: tuple[tuple[DenseConfig, Path], ...] = ()
    normalised: bool = False
    max_tokens: int = 0
    lowercases: bool = False
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str = ""


def read_sentence_modules(folder: Path) -> SentenceModules:
    """Reads modules.json and the files that it names; a folder without it has a model only.

    Raises:
        CheckpointError: A module or setting is unknown or not supported.
    """
    prompts, default = _prompts(folder)
    if not (folder / MODULES).exists():
        return SentenceModules(transformer=folder, prompts=prompts, default_prompt=default)
    modules = _modules(folder)
    kinds = [kind for kind, _ in modules]
    if kinds[:2] != ["Transformer", "Pooling"] or not set(kinds[2:]) <= {"Dense", "Normalize"}:
        expected = "Transformer, Pooling, any Dense, and Normalize at the end"
        raise CheckpointError(f"{MODULES}: {', '.join(kinds)} is not supported; only {expected} is")
    if "Normalize" in kinds[:-1]:
        raise CheckpointError(f"{MODULES}: Normalize must be the last module")
    transformer, pooling = modules[0][1], modules[1][1]
    width, modes = _pooling(pooling, has_prompts=any(prompts.values()))
    max_tokens, lowercases = _lengths(transformer)
    return SentenceModules(
        transformer=transformer,
        pooling=modes,
        pooled_width=width,
        dense=tuple((_dense(path), path) for kind, path in modules if kind == "Dense"),
        normalised=kinds[-1] == "Normalize",
        max_tokens=max_tokens,
        lowercases=lowercases,
        prompts=prompts,
        default_prompt=default,
    )


def _modules(folder: Path) -> list[tuple[str, Path]]:
    """The kind and the folder of each module, in their order."""
    entries = read_json(folder / MODULES)
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise CheckpointError(f"{MODULES} must contain a list of modules")
    found = []
    for index, entry in enumerate(entries):
        fields = Fields(f"{MODULES}[{index}]", entry)
        fields.ignore("idx", "name")
        given, path = fields.text("type"), folder / fields.text("path", "")
        fields.expect("kwargs", [], {})
        fields.finish()
        if not given.startswith(PACKAGE):
            raise CheckpointError(f"{MODULES}: {given} is code that is not run; only {PACKAGE}* is supported")
        if not path.resolve().is_relative_to(folder.resolve()):
            raise CheckpointError(f"{MODULES}: {entry['path']!r} lies outside the folder")
        found.append((given.rpartition(".")[2], path))
    return found


def _pooling(folder: Path, *, has_prompts: bool) -> tuple[int, tuple[str, ...]]:
    fields = Fields.of_file(folder / "config.json")
    stated = fields.get("word_embedding_dimension")
    width = fields.integer("embedding_dimension" if stated is None else "word_embedding_dimension")
    if not fields.flag("include_prompt", default=True) and has_prompts:
        raise fields.error("include_prompt", "false", "is not supported for a model with prompts")
    modes = [ours for _, flag, ours in POOLINGS if fields.flag(f"pooling_mode_{flag}")]
    if stated_mode := fields.text("pooling_mode", ""):
        known = {mode: ours for mode, _, ours in POOLINGS}
        if stated_mode not in known:
            raise fields.error("pooling_mode", stated_mode, f"must be one of {', '.join(known)}")
        modes = modes or [known[stated_mode]]
    fields.finish()
    if not modes:
        raise CheckpointError(f"{fields.source} of {folder.name}: no pooling is switched on")
    return width, tuple(modes)


def _dense(folder: Path) -> DenseConfig:
    fields = Fields.of_file(folder / "config.json")
    given = fields.text("activation_function", "torch.nn.modules.linear.Identity")
    function = DENSE_FUNCTIONS.get(given.rpartition(".")[2])
    if function is None or not given.startswith("torch.nn."):
        known = ", ".join(DENSE_FUNCTIONS)
        raise fields.error("activation_function", given, f"is not supported; supported are {known}")
    found = DenseConfig(
        d_in=fields.integer("in_features"),
        d_out=fields.integer("out_features"),
        bias=fields.flag("bias", default=True),
        activation=function,
    )
    fields.expect("module_input_name", "sentence_embedding")
    fields.expect("module_output_name", "sentence_embedding")
    fields.finish()
    return found


def _lengths(transformer: Path) -> tuple[int, bool]:
    """The largest number of tokens, and whether texts are lowercased."""
    path = transformer / LENGTHS
    if not path.exists():
        return 0, False
    fields = Fields.of_file(path)
    max_tokens, lowercases = fields.integer("max_seq_length", 0, least=0), fields.flag("do_lower_case")
    for name in ("model_args", "tokenizer_args", "config_args", "method_kwargs", "processing_kwargs"):
        fields.expect(name, {})
    fields.expect("transformer_task", "feature-extraction")
    fields.expect("module_output_name", "token_embeddings")
    fields.expect(
        "modality_config", {"text": {"method": "forward", "method_output_name": "last_hidden_state"}}
    )
    fields.finish()
    return max_tokens, lowercases


def _prompts(folder: Path) -> tuple[dict[str, str], str]:
    """The prompts, and the name of the default one."""
    path = folder / SETTINGS
    if not path.exists():
        return {}, ""
    fields = Fields.of_file(path)
    fields.ignore("__version__", "similarity_fn_name", "model_type")
    # A cut of embeddings is asked for in requests.
    if fields.get("truncate_dim") is not None:
        raise CheckpointError(f"{SETTINGS}: truncate_dim is not supported; ask for dimensions in requests")
    prompts, default = fields.mapping("prompts"), fields.text("default_prompt_name", "")
    fields.finish()
    if not all(isinstance(text, str) for text in prompts.values()):
        raise CheckpointError(f"{SETTINGS}: prompts must be texts by name")
    if default and default not in prompts:
        raise fields.error("default_prompt_name", default, f"must be one of {', '.join(prompts) or 'none'}")
    return prompts, default

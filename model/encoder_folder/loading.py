"""Loads the text encoder of a folder."""

from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any, Final

import torch
from tokenizers import Tokenizer
from torch import Tensor

from attention_serving.model.checkpoints import CheckpointError
from attention_serving.model.checkpoints.files import (
    NamedTensors,
    as_float32,
    check_tensors,
    open_folder,
    parameter_shapes,
)
from attention_serving.model.config import ConfigError
from attention_serving.model.encoder.config import EncoderConfig
from attention_serving.model.encoder.encoder import TextEncoder
from attention_serving.model.encoder_folder.families import FAMILIES
from attention_serving.model.encoder_folder.families.family import WITHOUT_EFFECT, Family
from attention_serving.model.encoder_folder.fields import Fields
from attention_serving.model.encoder_folder.sentence import SentenceModules, read_sentence_modules
from attention_serving.model.encoder_folder.tokenizer import load_tokenizer, stated_max_tokens

CONFIGURATION: Final = "config.json"


@dataclass(frozen=True, eq=False, kw_only=True)
class LoadedEncoder:
    """The encoder of a folder.

    Attributes:
        module: In evaluation mode, weights in float32.
        family: The `model_type` of its configuration.
        dimensions: Numbers of elements that the folder says embeddings can be shortened to.
        prompts: Texts that are put before a text, by name.
        default_prompt: Name of the prompt of a text that names none; empty for none.
        skipped: Names of tensors that are not part of the encoder.
    """

    module: TextEncoder
    tokenizer: Tokenizer
    family: str
    dimensions: tuple[int, ...] = ()
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str = ""
    skipped: tuple[str, ...] = ()


def load_encoder(path: str | PathLike[str], *, pooling: str = "") -> LoadedEncoder:
    """Reads the text encoder of a folder.

    Args:
        path: The folder: config.json, the weights and tokenizer.json, with or without the modules.json of
            sentence-transformers.
        pooling: One of `POOLINGS`, for folders that do not state it. Default: that of the family.

    Raises:
        CheckpointError: The folder lacks something, contradicts itself, or states something that is not
            supported. The message names it.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise CheckpointError(f"{path}: is not a folder")
    try:
        return _read(folder, pooling)
    except (CheckpointError, ConfigError) as error:
        raise CheckpointError(f"{path}: {error}") from error


def _read(folder: Path, pooling: str) -> LoadedEncoder:
    sentence = read_sentence_modules(folder)
    fields = Fields.of_file(sentence.transformer / CONFIGURATION)
    model_type, family = _family(fields)
    dimensions = _dimensions(fields)
    sizes = family.configure(fields)
    fields.ignore(*WITHOUT_EFFECT)
    fields.finish()
    config = _config(sizes, sentence, pooling, own_pooling=family.pooling)
    tokenizer = load_tokenizer(
        sentence.transformer, lowercases=sentence.lowercases, vocabulary=config.vocabulary
    )
    dense = _dense_weights(sentence)
    weights, skipped = _weights(config, family, open_folder(sentence.transformer), elsewhere=dense.keys())
    with torch.random.fork_rng(devices=[]):  # keeps the caller's random numbers
        module = TextEncoder(config)
    module.load_state_dict(weights | dense, assign=True)
    return LoadedEncoder(
        module=module.eval(),
        tokenizer=tokenizer,
        family=model_type,
        dimensions=dimensions,
        prompts=sentence.prompts,
        default_prompt=sentence.default_prompt,
        skipped=skipped,
    )


def _config(
    sizes: dict[str, Any], stated: SentenceModules, pooling: str, *, own_pooling: tuple[str, ...]
) -> EncoderConfig:
    """The configuration of a model of some sizes, with what the folder states about its embeddings."""
    # A table of positions that counts from the padding id has no rows for it and for those before it.
    positions = sizes.pop("max_positions", 0) or sizes["positions"] - sizes.get("padding_id", -1) - 1
    own_dense, own_pooling = sizes.pop("dense", ()), sizes.pop("pooling", own_pooling)
    if stated.pooling and own_dense:
        raise CheckpointError("modules.json: Pooling after a model with a projection is not supported")
    if stated.pooling and pooling:
        raise CheckpointError(f"pooling {pooling!r}: the folder states its own")
    if stated.pooled_width not in (0, sizes["width"]):
        raise CheckpointError(
            f"Pooling is for vectors of width {stated.pooled_width}; the model has {sizes['width']}"
        )
    if stated.max_tokens > positions:
        raise CheckpointError(
            f"max_seq_length={stated.max_tokens}: the model has positions for {positions} tokens"
        )
    return EncoderConfig(
        **sizes,
        max_tokens=stated.max_tokens or min(positions, stated_max_tokens(stated.transformer) or positions),
        pooling=stated.pooling or ((pooling,) if pooling else own_pooling),
        dense=(*own_dense, *(config for config, _ in stated.dense)),
        normalised=stated.normalised,
    )


def _dense_weights(stated: SentenceModules) -> dict[str, Tensor]:
    """The weights of the linear layers after pooling, by the names of their parameters."""
    found: dict[str, Tensor] = {}
    for index, (config, path) in enumerate(stated.dense):
        expected: dict[str, tuple[int, ...]] = {"linear.weight": (config.d_out, config.d_in)}
        expected |= {"linear.bias": (config.d_out,)} if config.bias else {}
        tensors = open_folder(path)
        check_tensors(tensors, expected, tensors.keys() - expected.keys(), where=f"{path.name}: ")
        found |= {f"pooling.dense.{index}.{name}": as_float32(name, tensors[name]) for name in expected}
    return found


def _family(fields: Fields) -> tuple[str, Family]:
    if fields.get("auto_map") is not None:
        raise CheckpointError(f"{CONFIGURATION}: auto_map names code of the folder, which is not run")
    given = fields.get("model_type")
    if not isinstance(given, str) or given not in FAMILIES:
        wrong = "is missing" if given is None else f"{given!r} is not supported"
        known = ", ".join(sorted(FAMILIES))
        raise CheckpointError(f"{CONFIGURATION}: model_type {wrong}; supported are {known}")
    return given, FAMILIES[given]


def _dimensions(fields: Fields) -> tuple[int, ...]:
    """What the folder states about shortened embeddings."""
    found = fields.items("matryoshka_dimensions")
    if not all(isinstance(size, int) and not isinstance(size, bool) and size > 0 for size in found):
        raise fields.error("matryoshka_dimensions", found, "must be positive integers")
    return tuple(sorted(set(found)))


def _weights(
    config: EncoderConfig, family: Family, tensors: NamedTensors, *, elsewhere: Set[str]
) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """The parameters that are not elsewhere, and the names of tensors that are not part of the encoder."""
    shapes = parameter_shapes(lambda: TextEncoder(config))
    shapes = {name: shape for name, shape in shapes.items() if name not in elsewhere}
    by_prefix = [{name: family.stored(name, prefix) for name in shapes} for prefix in family.prefixes]
    sources = max(by_prefix, key=lambda each: sum(source.name in tensors for source in each.values()))
    expected = {source.name: source.shape_in_file(shapes[name]) for name, source in sources.items()}
    beside = sorted(tensors.keys() - expected.keys())
    skipped = tuple(name for name in beside if family.is_neighbour(name))
    check_tensors(tensors, expected, set(beside) - set(skipped))
    parameters = {
        name: source.cut(as_float32(source.name, tensors[source.name])) for name, source in sources.items()
    }
    return parameters, skipped

"""Loads the text encoder of a folder."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Final

import torch
from tokenizers import Tokenizer
from torch import Tensor

from attention_serving.model.checkpoints.errors import CheckpointError, listed
from attention_serving.model.config import ConfigError
from attention_serving.model.encoder.config import EncoderConfig
from attention_serving.model.encoder.encoder import TextEncoder
from attention_serving.model.encoder_folder.families import FAMILIES
from attention_serving.model.encoder_folder.families.family import WITHOUT_EFFECT, Family, Stored
from attention_serving.model.encoder_folder.fields import Fields
from attention_serving.model.encoder_folder.sentence import read_sentence_modules
from attention_serving.model.encoder_folder.tensors import FolderTensors, open_tensors
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
        return _Reader(folder, pooling).read()
    except (CheckpointError, ConfigError) as error:
        raise CheckpointError(f"{path}: {error}") from error


class _Reader:
    """Reads one folder."""

    def __init__(self, folder: Path, pooling: str) -> None:
        self._sentence = read_sentence_modules(folder)
        self._folder = self._sentence.transformer
        self._pooling = pooling
        fields = Fields.of_file(self._folder / CONFIGURATION)
        self._model_type, self._family = _family(fields)
        self._dimensions = _dimensions(fields)
        self._sizes = self._family.configure(fields)
        fields.ignore(*WITHOUT_EFFECT)
        fields.finish()

    def read(self) -> LoadedEncoder:
        config = self._config()
        tokenizer = load_tokenizer(
            self._folder, lowercases=self._sentence.lowercases, vocabulary=config.vocabulary
        )
        with open_tensors(self._folder) as tensors:
            weights, skipped = _weights(config, self._family, tensors, self._heads())
        weights |= self._dense_weights()
        with torch.random.fork_rng(devices=[]):  # keeps the caller's random numbers
            module = TextEncoder(config)
        module.load_state_dict(weights, assign=True)
        return LoadedEncoder(
            module=module.eval(),
            tokenizer=tokenizer,
            family=self._model_type,
            dimensions=self._dimensions,
            prompts=self._sentence.prompts,
            default_prompt=self._sentence.default_prompt,
            skipped=skipped,
        )

    def _config(self) -> EncoderConfig:
        sizes, stated = dict(self._sizes), self._sentence
        positions = sizes.pop("max_positions")
        own_dense = sizes.pop("dense", ())
        own_pooling = sizes.pop("pooling", self._family.pooling)
        if stated.pooling and own_dense:
            raise CheckpointError(f"modules.json: Pooling after {self._model_type} is not supported")
        if stated.pooling and self._pooling:
            raise CheckpointError(f"pooling {self._pooling!r}: the folder states its own")
        if stated.pooled_width not in (0, sizes["width"]):
            raise CheckpointError(
                f"Pooling is for vectors of width {stated.pooled_width}; the model has {sizes['width']}"
            )
        return EncoderConfig(
            **sizes,
            max_tokens=self._max_tokens(positions),
            pooling=stated.pooling or ((self._pooling,) if self._pooling else own_pooling),
            dense=(*own_dense, *(config for config, _ in stated.dense)),
            normalised=stated.normalised,
        )

    def _max_tokens(self, positions: int) -> int:
        stated = self._sentence.max_tokens
        if stated > positions:
            raise CheckpointError(f"max_seq_length={stated}: the model has positions for {positions} tokens")
        return stated or min(positions, stated_max_tokens(self._folder) or positions)

    def _heads(self) -> frozenset[str]:
        """Names of parameters that have files of their own."""
        return frozenset(
            f"pooling.dense.{index}.linear.{kind}"
            for index in range(len(self._sentence.dense))
            for kind in ("weight", "bias")
        )

    def _dense_weights(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for index, (config, path) in enumerate(self._sentence.dense):
            expected: dict[str, tuple[int, ...]] = {"linear.weight": (config.d_out, config.d_in)}
            expected |= {"linear.bias": (config.d_out,)} if config.bias else {}
            with open_tensors(path) as tensors:
                problems = _problems(expected, tensors, sorted(tensors.names - expected.keys()))
                if problems:
                    raise CheckpointError(f"{path.name}: {listed(problems, separator='; ')}")
                found |= {f"pooling.dense.{index}.{name}": tensors.read(name) for name in expected}
        return found


def _family(fields: Fields) -> tuple[str, Family]:
    if fields.has("auto_map"):
        raise CheckpointError(f"{CONFIGURATION}: auto_map names code of the folder, which is not run")
    known = ", ".join(sorted(FAMILIES))
    if not fields.has("model_type"):
        raise CheckpointError(f"{CONFIGURATION}: model_type is missing; supported are {known}")
    given = fields.text("model_type")
    if given not in FAMILIES:
        raise CheckpointError(
            f"{CONFIGURATION}: model_type {given!r} is not supported; supported are {known}"
        )
    fields.restore("model_type", given)
    return given, FAMILIES[given]


def _dimensions(fields: Fields) -> tuple[int, ...]:
    """What the folder states about shortened embeddings."""
    found = fields.items("matryoshka_dimensions")
    if not all(isinstance(size, int) and not isinstance(size, bool) and size > 0 for size in found):
        raise fields.error("matryoshka_dimensions", found, "must be positive integers")
    return tuple(sorted(set(found)))


def _weights(
    config: EncoderConfig, family: Family, tensors: FolderTensors, elsewhere: frozenset[str]
) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """The parameters by name, and the names of tensors that are not part of the encoder.

    Shapes are compared before anything is allocated, because a small file can claim any shape.
    """
    with torch.device("meta"):
        shapes = {name: tuple(parameter.shape) for name, parameter in TextEncoder(config).named_parameters()}
    wanted = [name for name in shapes if name not in elsewhere]
    prefix = max(family.prefixes, key=lambda each: _held(wanted, family, each, tensors))
    sources = {name: family.stored(name, prefix) for name in wanted}
    expected = {source.name: source.shape_in_file(shapes[name]) for name, source in sources.items()}
    beside = sorted(tensors.names - expected.keys())
    skipped = tuple(name for name in beside if family.is_neighbour(name, prefix))
    problems = _problems(expected, tensors, [name for name in beside if name not in skipped])
    if problems:
        raise CheckpointError(listed(problems, separator="; "))
    return _read(sources, tensors), skipped


def _read(sources: Mapping[str, Stored], tensors: FolderTensors) -> dict[str, Tensor]:
    return {name: source.cut(tensors.read(source.name)) for name, source in sources.items()}


def _held(wanted: Sequence[str], family: Family, prefix: str, tensors: FolderTensors) -> int:
    return sum(family.stored(name, prefix).name in tensors.names for name in wanted)


def _problems(
    expected: Mapping[str, tuple[int, ...]], tensors: FolderTensors, unexpected: Iterable[str]
) -> list[str]:
    """What is missing, of a wrong shape or not expected, each by name."""
    problems = [f"{name}: missing" for name in expected if name not in tensors.names]
    problems += [f"{name}: unexpected" for name in unexpected]
    for name, shape in expected.items():
        if name in tensors.names and (found := tensors.shape(name)) != shape:
            problems.append(f"{name}: expected shape {shape}, found {found}")
    return problems

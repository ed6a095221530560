"""Loads the attention module of another project's checkpoint."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

import torch

from attention_serving.model.attention import MultiHeadAttention
from attention_serving.model.checkpoints.errors import CheckpointError, listed
from attention_serving.model.checkpoints.files import TensorFile, open_file
from attention_serving.model.checkpoints.layouts import Layout, Shape, find_layout
from attention_serving.model.checkpoints.sizes import CheckpointHints, derive_config, parameter_shapes
from attention_serving.model.config import AttentionConfig

_OUT_AND_IN = 2  # the axes of a weight


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """The attention of a checkpoint."""

    module: MultiHeadAttention
    """In evaluation mode, weights in float32."""
    skipped: tuple[str, ...]
    """Names under the prefix that are not part of attention."""


def load_checkpoint(
    path: str | PathLike[str],
    *,
    layout: str,
    prefix: str = "",
    heads: int,
    causal: bool = False,
    cross: bool = False,
    rotary_theta: float = 10_000.0,
) -> Checkpoint:
    """Reads the attention module under a prefix of a .safetensors, .pt, .pth or .bin file.

    Only the tensors of that module are read. Elements of float16, bfloat16 and float64 are converted to
    float32. Scores are scaled by 1 / sqrt(d_k).

    Args:
        path: The file. If it nests a state_dict, as in {"state_dict": {...}}, names begin with that key.
        layout: One of `LAYOUTS`.
        prefix: The part of each name before the layout's own names, such as "encoder.layer.0.attention.".
        heads: Number of query heads. The number of key and value heads follows from the shapes.
        causal: Whether rows must not attend to later rows; gpt2 and llama are always causal.
        cross: Whether keys come from a second sequence. In torch and generic this follows if query, key and
            value differ in width. Values are a third input if their width differs from that of the keys.
        rotary_theta: Base frequency of the layout llama; 0 for none. Scaled frequencies are not supported.

    Raises:
        CheckpointError: The file cannot be read, or does not hold the layout under the prefix: tensors are
            missing, unexpected, or of a wrong shape or type. The message lists them by name.
    """
    chosen = find_layout(layout)
    if cross and chosen.causal:
        raise CheckpointError(f"cross=True: layout {layout!r} is self-attention only")
    hints = CheckpointHints(
        heads=heads, causal=causal or chosen.causal, cross=cross, rotary_theta=rotary_theta
    )
    try:
        with open_file(Path(path)) as file:
            return _Reader(file, chosen, prefix, hints).read()
    except CheckpointError as error:
        raise CheckpointError(f"{path}, layout {layout!r}, prefix {prefix!r}: {error}") from error


class _Reader:
    """Reads the tensors under one prefix of a file by the names of a layout."""

    def __init__(self, file: TensorFile, layout: Layout, prefix: str, hints: CheckpointHints) -> None:
        self._file, self._layout, self._prefix, self._hints = file, layout, prefix, hints
        self._names = {name.removeprefix(prefix) for name in file.names if name.startswith(prefix)}
        self._sources = layout.choose(self._names, cross=hints.cross)
        self._wanted = {source.name for source in self._sources.values()}

    def read(self) -> Checkpoint:
        if not self._wanted & self._names:
            raise CheckpointError(_wrong_prefix(self._layout, self._file.names))
        config = self._config()
        weights = {
            ours: source.cut(self._file.read(self._prefix + source.name))
            for ours, source in self._sources.items()
        }
        with torch.random.fork_rng(devices=[]):  # keeps the caller's random numbers
            module = MultiHeadAttention(config)
        module.load_state_dict(weights)
        skipped = tuple(self._prefix + name for name in sorted(self._names - self._wanted))
        return Checkpoint(module=module.eval(), skipped=skipped)

    def _config(self) -> AttentionConfig:
        """The configuration that all tensors of the file fit.

        Raises:
            CheckpointError: No configuration fits. The message lists every problem.
        """
        problems = self._wrong_names()
        stored = {name: self._file.shape(self._prefix + name) for name in sorted(self._wanted & self._names)}
        weights = {source.name for ours, source in self._sources.items() if ours.endswith(".weight")}
        flat = [name for name in sorted(weights & stored.keys()) if not _is_matrix(stored[name])]
        problems += [f"{self._prefix}{name}: expected a matrix, found shape {stored[name]}" for name in flat]
        if flat or not weights <= stored.keys():  # the sizes stay unknown
            raise CheckpointError(_report(problems))
        shapes = {o: s.shape_here(stored[s.name]) for o, s in self._sources.items() if s.name in stored}
        try:
            config = derive_config(self._layout, shapes, self._hints)
        except CheckpointError as error:
            raise CheckpointError(_report([*problems, str(error)])) from error
        problems += self._wrong_shapes(config, stored)
        if problems:
            raise CheckpointError(_report(problems))
        return config

    def _wrong_names(self) -> list[str]:
        missing = [f"{self._prefix}{name}: missing" for name in sorted(self._wanted - self._names)]
        beside = sorted(self._names - self._wanted)
        refusals = [
            f"{self._prefix}{name}: {self._layout.refusal(name)}"
            for name in beside
            if not self._layout.is_neighbour(name)
        ]
        return missing + refusals

    def _wrong_shapes(self, config: AttentionConfig, stored: Mapping[str, Shape]) -> list[str]:
        expected = {
            self._sources[ours].name: self._sources[ours].shape_in_file(shape)
            for ours, shape in parameter_shapes(config).items()
        }
        return [
            f"{self._prefix}{name}: expected shape {expected[name]}, found {shape}"
            for name, shape in stored.items()
            if shape != expected[name]
        ]


def _report(problems: Sequence[str]) -> str:
    return listed(problems, separator="; ")


def _is_matrix(shape: Shape) -> bool:
    return len(shape) == _OUT_AND_IN and all(shape)


def _wrong_prefix(layout: Layout, names: Sequence[str]) -> str:
    """The error for a prefix without tensors of the layout, with the prefixes that have some."""
    anchors = {next(iter(variant.values())).name for variant in layout.variants}
    starts = {name.removesuffix(anchor) for name in names for anchor in anchors if name.endswith(anchor)}
    prefixes = [repr(start) for start in sorted(starts) if not start or start.endswith(".")]
    if prefixes:
        return f"this prefix has no tensor of the layout; these prefixes have: {listed(prefixes)}"
    return f"the file has no tensor of the layout; it holds {listed(sorted(names)) or 'nothing'}"

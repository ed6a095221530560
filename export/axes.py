"""Finds which axes of the inputs of a module vary, by runs in eager PyTorch with other sizes.

Shapes: B batch, T rows of a sequence.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, count, product
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from attention_serving.artifact.encoder import SCORES
from attention_serving.artifact.manifest import BATCH_AXIS
from attention_serving.export.adapted import (
    ATTENDING,
    KEY_PADDING,
    LENGTHS_OF,
    PADDING,
    Meaning,
    call_module,
    is_mask_name,
)
from attention_serving.export.errors import ExportError
from attention_serving.export.probe import failure
from attention_serving.export.signature import (
    IdBound,
    StandardViews,
    ValueRange,
    named_outputs,
    without_fused_layers,
)

SEQUENCE_AXIS, CONTEXT_VECTORS = "sequence", "context_vectors"
TRIED_BATCH = 3
# Ids of few columns and small ranges may equal others by chance.
TRIED_IDS = 12
# Rows of a sequence that a mask is tried with, of which it hides the last ones.
TRIED_ROWS, HIDDEN_ROWS = 11, 3
KEPT_ROWS = TRIED_ROWS - HIDDEN_ROWS
# Sets of more inputs are tried only as a whole.
MOST_TOGETHER = 4
# Close results are compared with eager PyTorch again before anything is exported.
CLOSE = 1e-3


class Axis(NamedTuple):
    """An axis of an input."""

    name: str
    at: int


Sizes = Mapping[Axis, int]
Group = frozenset[Axis]
"""Axes that have the same size in every call."""


@dataclass(frozen=True, kw_only=True)
class Understanding:
    """What the inputs of a module are.

    Attributes:
        axes: By input, the names of the axes that vary, as the module has them.
        masks: By input, what the caller or a run says about a mask.
        id_bounds: By input of ids, the exclusive upper bound of the embedding that reads it.
        output_axes: The batch axis of each output.
        output_names: Names of the outputs, if they have any.
        notes: What else is to be known.
        flags: Inputs that could be masks, and what makes them masks.
    """

    axes: Mapping[str, Mapping[int, str]]
    masks: Mapping[str, str | None]
    id_bounds: Mapping[str, IdBound] = field(default_factory=dict)
    output_axes: tuple[int, ...] = ()
    output_names: Sequence[str] = (CONTEXT_VECTORS,)
    notes: Sequence[str] = ()
    flags: Sequence[str] = ()

    @property
    def batch_second(self) -> frozenset[str]:
        """The inputs (T, B, ...)."""
        return frozenset(name for name, axes in self.axes.items() if axes.get(1) == BATCH_AXIS)

    def __str__(self) -> str:
        """The arguments of `export_module` that say the same, and notes."""
        arguments = [f"dynamic_axes={ {name: dict(axes) for name, axes in self.axes.items()} }"]
        arguments += [f"masks={ {name: str(m) if m else m for name, m in self.masks.items()} }"] * bool(
            self.masks
        )
        arguments.append(f"output_names={list(self.output_names)}")
        return "\n".join(
            ["understood: " + ", ".join(arguments), *(f"  {note}" for note in (*self.notes, *self.flags))]
        )


def understand(
    module: nn.Module,
    examples: Mapping[str, Sequence[Tensor]],
    dynamic_axes: Mapping[str, Mapping[int, str]],
    masks: Mapping[str, str | None],
    *,
    positional: bool,
) -> Understanding:
    """Completes what the caller says about the inputs of a module.

    Args:
        module: Is run, and can be changed by it.
        examples: By input, its values in one or more examples.
        dynamic_axes: By input, the names of axes, of inputs whose axes are not to be found.
        masks: By input, what masks mean, as far as the caller says it.
        positional: Whether `forward` takes the inputs by position.

    Raises:
        ExportError: The module does not run on its example.
        ValueError: The inputs have no common batch axis.
    """
    try:
        trials = _Trials(module, examples, positional=positional)
    except ExportError:
        if set(dynamic_axes) < set(examples):
            raise
        return Understanding(axes=dynamic_axes, masks=masks)  # other sizes may run
    names, omitted = trials.names, [f"output {path}: left out, not a tensor" for path in trials.omitted]
    batch, output_axes = _batch_axes(trials, dynamic_axes)
    groups = _row_groups(trials, dynamic_axes, batch)
    axes = _name_axes(trials, dynamic_axes, batch, groups)
    meanings, flags = _masks(trials, masks, batch, groups, set(examples) - set(dynamic_axes))
    meanings |= _lengths(trials, set(examples) - set(dynamic_axes) - set(masks), groups, axes)
    fixed = [
        f"input {name}: {tuple(tensor.shape[1:])} is fixed in each sequence"
        for name, tensor in trials.first.items()
        if name not in dynamic_axes and len(axes[name]) == 1 and tensor.ndim > 1
    ]
    return Understanding(
        axes=axes,
        masks=meanings,
        id_bounds=trials.id_bounds,
        output_axes=output_axes,
        output_names=names,
        notes=[*fixed, *omitted],
        flags=flags,
    )


class EmbeddingReads(TorchFunctionMode):
    """Records the ids that embeddings are read with, and how many there are."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[tuple[Tensor, int]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Calls an operator."""
        if func is F.embedding:
            self.reads.append((args[0].clone(), len(args[1])))
        return func(*args, **(kwargs or {}))


class _Trials:
    """Runs of a module on changed examples.

    Attributes:
        first: The first example.
        id_bounds: By input, the exclusive upper bound of the embedding that reads it.
        names: Names of the outputs.
        omitted: Those that are not tensors.
    """

    def __init__(
        self, module: nn.Module, examples: Mapping[str, Sequence[Tensor]], *, positional: bool
    ) -> None:
        self._module, self._examples, self._positional = module, examples, positional
        self.first = {name: values[0] for name, values in examples.items()}
        self.id_bounds: dict[str, IdBound] = {}
        self._random = torch.Generator().manual_seed(0)
        try:
            self.names, self.omitted = self._names(self._call(self.first))
        except Exception as error:  # a module may raise anything
            raise failure(self.first, error) from error
        self.id_bounds = self._find_id_bounds()

    def sizes(self, axis: Axis) -> tuple[int, ...]:
        """Of an axis in all examples."""
        return tuple(tensor.shape[axis.at] for tensor in self._examples[axis.name])

    def resize(self, sizes: Sizes, *, draws: bool = False) -> dict[str, Tensor]:
        """The first example with other sizes: rows are repeated, or random values are drawn like them."""
        inputs = {}
        for name, tensor in self.first.items():
            shape = [sizes.get(Axis(name, at), size) for at, size in enumerate(tensor.shape)]
            for at, size in enumerate(shape):
                tensor = tensor.index_select(at, torch.arange(size) % tensor.shape[at])  # noqa: PLW2901
            inputs[name] = self._draw(name, tensor) if draws else tensor
        return inputs

    def may_be_lengths(self, name: str) -> bool:
        """Whether an input holds integers (B,) that no embedding reads, and has the name of lengths."""
        tensor = self.first[name]
        is_integer = tensor.dtype is torch.int64 and tensor.ndim == 1
        return is_integer and "len" in name and name not in self.id_bounds

    def run(self, inputs: Mapping[str, Tensor]) -> list[Tensor] | None:
        """The outputs; None if the module fails."""
        try:
            return [*named_outputs(self._call(inputs))[0].values()]
        except Exception:  # a module may raise anything
            return None

    def takes(self, sizes: Sizes) -> bool:
        """Whether the module runs with these sizes, also with masks that hide a row.

        Models of Hugging Face ignore masks that hide nothing, of whatever size.
        """
        inputs = self.resize(sizes)
        hiding = {name: _flip_last(tensor) for name, tensor in inputs.items() if is_mask_name(name)}
        return self.run(inputs) is not None and (not hiding or self.run(inputs | hiding) is not None)

    def _call(self, inputs: Mapping[str, Tensor]) -> Any:
        copies = {name: tensor.clone() for name, tensor in inputs.items()}
        # Fused kernels do not check that keys and values have one length.
        with torch.inference_mode(), without_fused_layers(), StandardViews(), sdpa_kernel(SDPBackend.MATH):
            return call_module(self._module, copies, positional=self._positional)

    @staticmethod
    def _names(outputs: Any) -> tuple[list[str], list[str]]:
        tensors, omitted = named_outputs(outputs)
        if len(tensors) == 1 and next(iter(tensors)) in ("", "0"):
            is_score = next(iter(tensors.values())).shape[1:] in ((), (1,))
            return [SCORES if is_score else CONTEXT_VECTORS], omitted
        return [f"output_{path}" if path.isdecimal() else path for path in tensors], omitted

    def _draw(self, name: str, tensor: Tensor) -> Tensor:
        """Other values, in the range of the examples; a mask and lengths stay as they are."""
        if self.may_be_lengths(name):
            return tensor
        if tensor.dtype is torch.int64 and not is_mask_name(name):
            most = torch.tensor(self.id_bounds.get(name, int(self.first[name].max()) + 1)).clamp(min=1)
            columns = most if most.ndim and tensor.shape[-1:] == most.shape else most.min()
            return (torch.rand(tensor.shape, generator=self._random, dtype=torch.float64) * columns).long()
        if not tensor.is_floating_point() or is_mask_name(name):
            return tensor
        low, high = float(self.first[name].min()), float(self.first[name].max())
        if low == high or tensor.ndim < 2 or ValueRange.of([self.first[name]]) is None:  # noqa: PLR2004
            return torch.randn(tensor.shape, generator=self._random)
        return low + (high - low) * torch.rand(tensor.shape, generator=self._random)

    def _find_id_bounds(self) -> dict[str, IdBound]:
        """Those of inputs whose ids, or these plus a constant, are all that an embedding is read with."""
        ids = [n for n, tensor in self.first.items() if tensor.dtype is torch.int64 and not is_mask_name(n)]
        with EmbeddingReads() as records:
            self.run(self.first)
        least = min((rows for _, rows in records.reads), default=0)
        for most in (least // 2 + 1, least // 2):
            draws = [self._ids_and_reads(ids, max(most, 2)) for _ in range(TRIED_IDS)]
            if len({len(reads) for _, reads in draws}) == 1 and draws[0][1]:
                break
        else:
            return {}
        reads = [*zip(*(reads for _, reads in draws), strict=True)]
        bounds = dict[str, IdBound]()
        for name in ids:
            values = [inputs[name] for inputs, _ in draws]
            if (bound := _id_bound(values, reads)) is not None:
                bounds[name] = bound
            elif values[0].ndim == 2:  # noqa: PLR2004 - (B, F), maybe with an embedding for each column
                columns = [
                    _id_bound(column, reads) for column in zip(*(ids.T for ids in values), strict=True)
                ]
                if None not in columns:
                    bounds[name] = tuple(filter(None, columns))
        return bounds

    def _ids_and_reads(
        self, names: Sequence[str], most: int
    ) -> tuple[dict[str, Tensor], list[tuple[Tensor, int]]]:
        drawn = {name: torch.randint(most, self.first[name].shape, generator=self._random) for name in names}
        with EmbeddingReads() as records:
            ran = self.run({**self.first, **drawn}) is not None
        return drawn, records.reads if ran else []


def _id_bound(draws: Sequence[Tensor], reads: Sequence[Sequence[tuple[Tensor, int]]]) -> int | None:
    """That of embeddings which are read, in each draw, with these ids or with these plus a constant."""
    bounds = list[int]()
    for read in reads:
        offsets = {_offset(ids, values) for ids, (values, _) in zip(draws, read, strict=True)}
        if len(offsets) == 1 and (offset := offsets.pop()) is not None:
            bounds.append(read[0][1] - offset)
    return min(bounds, default=None)


def _offset(ids: Tensor, read: Tensor) -> int | None:
    """What an embedding is read with beyond the ids of an input; None if that is not a constant."""
    for candidate in (ids, ids.mT if ids.ndim > 1 else ids):
        if candidate.numel() == read.numel():
            differences = read.flatten() - candidate.flatten()
            if (offset := int(differences[0])) >= 0 and bool((differences == offset).all()):
                return offset
    return None


def _flip_last(mask: Tensor) -> Tensor:
    """A mask with another value in its last column."""
    last = mask.narrow(-1, mask.shape[-1] - 1, 1)
    return torch.cat([mask.narrow(-1, 0, mask.shape[-1] - 1), (last == 0).to(mask.dtype)], -1)


def _batch_axes(
    trials: _Trials, dynamic_axes: Mapping[str, Mapping[int, str]]
) -> tuple[dict[str, int], tuple[int, ...]]:
    """The batch axis of each input and of each output: those that keep sequences independent."""
    choices = []
    for name, tensor in trials.first.items():
        ats = [at for at, axis in dynamic_axes.get(name, {}).items() if axis == BATCH_AXIS]
        choices.append(ats or range(0 if name in dynamic_axes else min(tensor.ndim, 2)))
    names = [*trials.first]
    if missing := [name for name, choice in zip(names, choices, strict=True) if not choice]:
        if missing[0] in dynamic_axes:  # ModuleInputs refuses it
            return dict.fromkeys(names, 0), ()
        raise ValueError(
            f"input {missing[0]!r} is a scalar, without a batch axis: make it an attribute of the module"
        )
    assignments = [
        batch
        for ats in sorted(product(*choices), key=sum)
        for batch in [dict(zip(names, ats, strict=True))]
        if len({trials.sizes(Axis(*axis)) for axis in batch.items()}) == 1
    ]
    if not assignments:
        shapes = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in trials.first.items())
        raise ValueError(
            f"example_inputs: {shapes} have no common batch axis: each input has the batch on axis 0, or on "
            f"axis 1 in modules with batch_first=False; make an input without it an attribute of the module"
        )
    for batch in assignments:
        if (output_axes := _independent_outputs(trials, batch)) is not None:
            return batch, output_axes
    return assignments[0], ()


def _independent_outputs(trials: _Trials, batch: Mapping[str, int]) -> tuple[int, ...] | None:
    """The batch axis of each output; None if sequences depend on each other."""
    inputs = trials.resize({Axis(*axis): TRIED_BATCH for axis in batch.items()}, draws=True)
    if (together := trials.run(inputs)) is None:
        return None
    axes = dict[int, int]()
    for index in range(TRIED_BATCH):
        alone = trials.run({name: tensor.narrow(batch[name], index, 1) for name, tensor in inputs.items()})
        if alone is None or len(alone) != len(together):
            return None
        for at, (single, many) in enumerate(zip(alone, together, strict=True)):
            different = [
                axis for axis, size in enumerate(single.shape) if many.shape[axis : axis + 1] != (size,)
            ]
            if single.ndim != many.ndim or len(different) > 1:
                return None
            axes[at] = different[0] if different else 0
            part = many.narrow(axes[at], index, 1) if different else many
            if not _is_close(single, part):
                return None
    return tuple(axes.values())


def _are_close(first: Sequence[Tensor], second: Sequence[Tensor]) -> bool:
    """Whether two runs have the same results."""
    return len(first) == len(second) and all(map(_is_close, first, second))


def _is_close(first: Tensor, second: Tensor) -> bool:
    if first.shape != second.shape:
        return False
    first, second = first.double(), second.double()
    scale = float(first.nan_to_num().abs().max()) if first.numel() else 0.0
    return torch.allclose(first, second, rtol=CLOSE, atol=CLOSE * scale, equal_nan=True)


def _row_groups(
    trials: _Trials, dynamic_axes: Mapping[str, Mapping[int, str]], batch: Mapping[str, int]
) -> list[Group]:
    """The axes that vary, with those that vary together: the smallest sets with which the module runs."""
    named_axes = dict[str, set[Axis]]()
    for name, axes in dynamic_axes.items():
        for at, axis in axes.items():
            if axis != BATCH_AXIS:
                named_axes.setdefault(axis, set()).add(Axis(name, at))
    groups = [Group(axes) for axes in named_axes.values()]
    free = [
        axis
        for name, tensor in trials.first.items()
        if name not in dynamic_axes
        for axis in _row_axes(name, tensor, batch[name])
    ]
    base = _grown(trials, free)
    for accepts in (_varies, _varies_in_one_direction):
        for size in (*range(1, MOST_TOGETHER + 1), len(free) + len(named_axes)):
            for units in combinations([*groups, *(Group([axis]) for axis in free)], size):
                group = Group().union(*units)
                has_rows = any(not is_mask_name(axis.name) for axis in group)
                is_candidate = has_rows and not group.isdisjoint(free) and _are_one_size(trials, group)
                if is_candidate and accepts(trials, base, group):
                    group = group.union(*(other for other in groups if not other.isdisjoint(group)))
                    groups = [other for other in groups if other.isdisjoint(group)] + [group]
                    free = [axis for axis in free if axis not in group]
    return groups


def _row_axes(name: str, tensor: Tensor, batch_axis: int) -> list[Axis]:
    """The axes of an input that may hold rows."""
    if is_mask_name(name) and tensor.ndim > 2 and not batch_axis:  # noqa: PLR2004 - (B, ..., Tq, Tk)
        return [Axis(name, at) for at in (tensor.ndim - 2, tensor.ndim - 1) if tensor.shape[at] > 1]
    return [Axis(name, 1 - batch_axis)] if tensor.ndim > 1 else []


def _are_one_size(trials: _Trials, group: Group) -> bool:
    return len({trials.sizes(axis) for axis in group}) == 1


def _grown(trials: _Trials, axes: Sequence[Axis]) -> Sizes:
    """Sizes in place of 1, which is broadcast, so that nothing shows which axes belong together."""
    single = [axis for axis in axes if trials.first[axis.name].shape[axis.at] == 1]
    choices = [dict.fromkeys(single, 4), *({axis: 4} for axis in single)]
    return next((sizes for sizes in choices if trials.takes(sizes)), {})


def _tries(trials: _Trials, base: Sizes, group: Group) -> Iterator[list[dict[Axis, int]]]:
    """Smaller sizes of the axes of a group, then larger ones."""
    axis = next(iter(group))
    size = base.get(axis, trials.first[axis.name].shape[axis.at])
    for sizes in ((size - 1, size // 2), (size + 1, 2 * size)):
        yield [{**base, **dict.fromkeys(group, rows)} for rows in sizes if rows > 1]


def _varies(trials: _Trials, base: Sizes, group: Group) -> bool:
    """Whether the module runs with fewer and with more rows; of two rows, with more that change a result."""
    fewer, more = _tries(trials, base, group)
    return any(map(trials.takes, more)) and (
        any(map(trials.takes, fewer)) if fewer else _varies_in_one_direction(trials, base, group)
    )


def _varies_in_one_direction(trials: _Trials, base: Sizes, group: Group) -> bool:
    """Whether the module runs with fewer rows, or with more that change a result."""
    fewer, more = _tries(trials, base, group)
    if any(map(trials.takes, fewer)):
        return True
    usual = trials.run(trials.resize(base))
    for outputs in map(trials.run, map(trials.resize, more)):
        if outputs is not None and usual is not None:
            return not _are_close(usual, outputs)
    return False


def _name_axes(
    trials: _Trials,
    dynamic_axes: Mapping[str, Mapping[int, str]],
    batch: Mapping[str, int],
    groups: Sequence[Group],
) -> dict[str, dict[int, str]]:
    """By input, the name of each axis that varies."""
    axes = {name: dict(dynamic_axes.get(name) or {batch[name]: BATCH_AXIS}) for name in trials.first}
    ordinary = [name for name in trials.first if not is_mask_name(name)] or [*trials.first]
    reserved = {axis for axis_names in dynamic_axes.values() for axis in axis_names.values()}
    for group in groups:
        callers_names = {dynamic_axes[axis.name][axis.at] for axis in group if axis.name in dynamic_axes}
        inputs = [name for name in ordinary if any(axis.name == name for axis in group)]
        usual = SEQUENCE_AXIS if len(groups) == 1 else f"{(inputs or [next(iter(group)).name])[0]}_length"
        name = next(iter(callers_names), None) or _unused(usual, reserved)
        reserved.add(name)
        for axis in group:
            if axis.name not in dynamic_axes:
                axes[axis.name][axis.at] = name
    return {name: dict(sorted(axis_names.items())) for name, axis_names in axes.items()}


def _unused(name: str, reserved: set[str]) -> str:
    return next(
        choice for n in count() for choice in [f"{name}_{n}" if n else name] if choice not in reserved
    )


def _masks(
    trials: _Trials,
    masks: Mapping[str, str | None],
    batch: Mapping[str, int],
    groups: Sequence[Group],
    names: set[str],
) -> tuple[dict[str, str | None], list[str]]:
    """What masks mean: as the caller says, or of (B, T) as a run shows; and notes on other flags."""
    meanings, flags = dict(masks), list[str]()
    for name, tensor in trials.first.items():
        group = next((group for group in groups if Axis(name, 1 - batch[name]) in group), None)
        is_flag = tensor.dtype is torch.bool or (
            is_mask_name(name) and bool(tensor.eq(0).logical_or(tensor == 1).all())
        )
        if name in masks or name not in names or tensor.ndim != 2 or not is_flag:  # noqa: PLR2004
            continue
        if group is None or len(group) == 1:
            continue
        matches = [m for m in (Meaning.HIDES, Meaning.ATTENDS) if _hides(trials, group, name, m)]
        meaning = matches[0] if len(matches) == 1 else None
        if name.endswith(KEY_PADDING) or (name.endswith(ATTENDING) and Meaning.ATTENDS in matches):
            continue  # a mask by its name
        if name.endswith(PADDING) and Meaning.HIDES in matches:
            meanings[name] = Meaning.HIDES
            continue
        if name.endswith(ATTENDING):
            meanings[name] = None
        tried = " and ".join(repr(match.value) for match in matches) or "no meaning"
        choice = (meaning or Meaning.HIDES).value
        advice = f"masks={{{name!r}: {choice!r}}}, or --mask '{name}={choice}', makes it a mask"
        flags.append(f"input {name}: an ordinary input; {advice} ({tried} was found to hide rows)")
    return meanings, flags


def _lengths(
    trials: _Trials, names: set[str], groups: Sequence[Group], axes: Mapping[str, Mapping[int, str]]
) -> dict[str, str]:
    """By input that holds the lengths of an axis, by its name and as a run shows: which axis."""
    lengths = dict[str, str]()
    for name in trials.first:
        if name in names and trials.may_be_lengths(name):
            counted = _groups_of_lengths(trials, groups, name)
            if len(counted) == 1:
                axis = next(iter(counted[0]))
                lengths[name] = LENGTHS_OF + axes[axis.name][axis.at]
    return lengths


def _groups_of_lengths(trials: _Trials, groups: Sequence[Group], name: str) -> list[Group]:
    """The axes of which rows after the lengths change no result of rows before them, as they do otherwise.

    In a causal module no later rows do: of its axes those count whose results depend on the lengths.
    """
    short, full = ({name: torch.full_like(trials.first[name], rows)} for rows in (KEPT_ROWS, TRIED_ROWS))
    hidden = [group for group in groups if _keeps_results(trials, group, short)]
    dependent = [group for group in hidden if not _keeps_results(trials, group, full)]
    return dependent or [group for group in hidden if _depends_on_lengths(trials, group, short, full)]


def _depends_on_lengths(trials: _Trials, group: Group, *lengths: Mapping[str, Tensor]) -> bool:
    """Whether the module runs with both lengths, and its results differ."""
    inputs = trials.resize(dict.fromkeys(group, TRIED_ROWS), draws=True)
    first, second = (trials.run({**inputs, **change}) for change in lengths)
    return first is not None and second is not None and not _are_close(first, second)


def _hides(trials: _Trials, group: Group, name: str, meaning: Meaning) -> bool:
    """Whether rows that a mask hides change no result of other rows."""
    shape = [*trials.first[name].shape]
    at = next(axis.at for axis in group if axis.name == name)
    shape[at] = TRIED_ROWS
    hidden = torch.zeros(shape, dtype=torch.bool)
    hidden.narrow(at, KEPT_ROWS, HIDDEN_ROWS).fill_(value=True)
    mask = hidden if meaning is Meaning.HIDES else ~hidden
    return _keeps_results(trials, group, {name: mask.to(trials.first[name].dtype)})


def _keeps_results(trials: _Trials, group: Group, mask: Mapping[str, Tensor]) -> bool:
    """Whether other values in the last rows, which a mask hides, change no result of the first ones."""
    sizes = dict.fromkeys(group, TRIED_ROWS)
    first, second = ({**trials.resize(sizes, draws=True), **mask} for _ in range(2))
    changed = dict(first)
    for axis in group:
        if axis.name not in mask and not is_mask_name(axis.name):
            rows = second[axis.name].narrow(axis.at, KEPT_ROWS, HIDDEN_ROWS)
            head = first[axis.name].narrow(axis.at, 0, KEPT_ROWS)
            changed[axis.name] = torch.cat([head, rows], axis.at)
    short = trials.run(trials.resize(dict.fromkeys(group, KEPT_ROWS)))
    before, after = trials.run(first), trials.run(changed)
    if short is None or before is None or after is None:
        return False
    return all(
        bool(a.isfinite().all()) and _is_close(a[head], b[head])
        for a, b, kept in zip(before, after, short, strict=True)
        for head in [tuple(map(slice, kept.shape))]
    )

"""Adapts a module to its graphs: other names, masks made of lengths, and what a tracer cannot follow.

Shapes: B batch, H heads, T rows of a sequence, Tq query rows, Tk key rows, d width of a head.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn.attention import flex_attention
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from attention_serving.artifact.manifest import ATTENTION_MASK
from attention_serving.export.assumptions import Place, innermost_place, user_place
from attention_serving.export.operators import REPLACEMENTS
from attention_serving.export.signature import StandardViews, output_tensors
from attention_serving.export.state import ModuleState

# How the names of masks end: of PyTorch's layers and of padding in general, which hide, and of Hugging Face.
KEY_PADDING, PADDING, ATTENDING = "key_padding_mask", "padding_mask", "attention_mask"


def is_mask_name(name: str) -> bool:
    """Whether an input is a mask by its name."""
    return "mask" in name


class Meaning(StrEnum):
    """What the elements of a mask say."""

    HIDES = "True hides"
    """As `key_padding_mask` and `attn_mask` of nn.MultiheadAttention. Of other types, 1 hides."""
    ATTENDS = "True attends"
    """As `attention_mask` of Hugging Face, and boolean masks of scaled_dot_product_attention."""
    ADDED = "added"
    """Real numbers that are added to the scores: 0 attends, -inf hides."""
    LENGTHS = "lengths"
    """Integers (B,): the rows of each sequence, after which all are hidden."""


# How a caller states that an input holds lengths, before the name of an axis.
LENGTHS_OF = f"{Meaning.LENGTHS} of "


@dataclass(frozen=True, kw_only=True)
class Mask:
    """A mask that a module takes. Its graphs take lengths or `attention_mask` in its place.

    Attributes:
        name: The parameter of the module.
        axes: Names of the batch and of one or two sequence axes; sizes of all others. Lengths have the axis
            that they count.
        dtype: Element type.
        meaning: What its elements say.
        optional: Whether the module computes the same without it if nothing is hidden.
    """

    name: str
    axes: tuple[str | int, ...]
    dtype: torch.dtype
    meaning: Meaning
    optional: bool = False

    @property
    def sequence_axes(self) -> tuple[str, ...]:
        """(key axis,) or (query axis, key axis)."""
        return tuple(axis for axis in self.axes[1:] if isinstance(axis, str))

    @property
    def opposite(self) -> Meaning:
        """What its elements would say if those that hide attended."""
        return Meaning.ATTENDS if self.meaning is Meaning.HIDES else Meaning.HIDES

    def encoded(self, allowed: Tensor, real: torch.dtype) -> Tensor:
        """The mask as the module takes it.

        Args:
            allowed: Booleans (B, Tk) or (B, 1, Tq, Tk), True = may attend.
            real: The element type of masks of real numbers: that of the module's arithmetic.
        """
        if self.meaning is Meaning.LENGTHS:
            return allowed.sum(1).to(self.dtype)
        dtype = real if self.dtype.is_floating_point else self.dtype
        batch, *lengths = allowed.shape
        sizes = iter([batch, *lengths[-len(self.sequence_axes) :]])
        mask = allowed.reshape([next(sizes) if isinstance(axis, str) else 1 for axis in self.axes])
        mask = mask.expand([-1 if isinstance(axis, str) else axis for axis in self.axes])
        if self.meaning is Meaning.ADDED:
            zeros = torch.zeros((), dtype=dtype, device=mask.device)
            return torch.where(mask, zeros, float("-inf"))
        return (~mask if self.meaning is Meaning.HIDES else mask).to(dtype)


class AdaptedModule(nn.Module):
    """Calls a module with the inputs of a graph."""

    def __init__(
        self,
        module: nn.Module,
        *,
        rows: Mapping[str, str],
        lengths: Mapping[str, str],
        masks: Sequence[Mask] = (),
        parameters: Mapping[str, str] | None = None,
        batch_second: Collection[str] = (),
        output_axes: Sequence[int] = (),
        positional: Sequence[str] = (),
    ) -> None:
        """Wraps a module.

        Args:
            module: The module.
            rows: By sequence axis, an input (B, T, ...) that has it.
            lengths: By sequence axis, the input that holds its lengths.
            masks: What the module takes and its graphs do not.
            parameters: By input, the parameter of the module if its name differs.
            batch_second: The parameters that the module takes as (T, B, ...).
            output_axes: The batch axis of each output of the module; empty if it is the first of all.
            positional: The order of the parameters if the module takes them by position.
        """
        super().__init__()
        self.module = module
        self.masks = tuple(masks)
        self.calls = TracedCalls()
        self.start = ModuleState(module)
        self._kept_size = 0
        self._rows = dict(rows)
        self._lengths = dict(lengths)
        self._names = dict(parameters or {})
        self._batch_second, self._output_axes = frozenset(batch_second), tuple(output_axes)
        self._positional = tuple(positional)

    @property
    def changes_calls(self) -> bool:
        """Whether the module takes its tensors in another form than its graphs."""
        return bool(self.masks or self._names or self._batch_second or self._positional) or any(
            self._output_axes
        )

    def forward(self, **inputs: Tensor) -> object:
        """Calls the module; without lengths or `attention_mask`, every row may be attended to."""
        arguments, masks = self.arguments(inputs), {mask.name for mask in self.masks}
        tensors = [values for name, values in arguments.items() if name not in masks]
        rows = [max(inputs[name].shape[:2]) for name in self._rows.values()]
        is_small = not torch.compiler.is_exporting() and (  # a trace would note the condition
            max(rows) <= MOST_FOLLOWED_ROWS if rows else len(tensors[0]) <= MOST_FOLLOWED_BATCH
        )
        with self.calls.following(tensors, is_small=is_small):
            if not torch.compiler.is_exporting():
                return self.call(arguments)
            before = ModuleState(self.module, copy=False)
            try:
                return self.call(arguments)
            finally:  # what the module keeps of a trace are symbols
                before.restore()

    def return_to_start(self) -> int:
        """Gives the module the state that it had before any call.

        Returns:
            The largest size of what the module has made anew since: a trace of longer sequences follows how
            it makes it.
        """
        grown = [value for value in tree_leaves(self.start.changes()) if isinstance(value, Tensor)]
        self._kept_size = max([self._kept_size, *(size for tensor in grown for size in tensor.shape)])
        self.start.restore()
        return self._kept_size

    @property
    def is_needed(self) -> bool:
        """Whether a trace of the bare module differs."""
        return self.changes_calls or self.calls.is_needed or bool(self.start.changes())

    def call(self, arguments: Mapping[str, Tensor]) -> object:
        """Calls the module with its arguments; its outputs begin with the batch axis."""
        if self._positional:
            arguments = {name: arguments[name] for name in self._positional}
        outputs = call_module(self.module, arguments, positional=bool(self._positional))
        if not any(self._output_axes):
            return outputs
        pairs = zip(output_tensors(outputs), self._output_axes, strict=True)
        return tuple(tensor.movedim(axis, 0) for tensor, axis in pairs)

    @contextmanager
    def using(self, masks: Sequence[Mask]) -> Iterator[None]:
        """Uses other masks while the block runs, and those of before after it, also if it raises."""
        before, self.masks = self.masks, tuple(masks)
        try:
            yield
        finally:
            self.masks = before

    def arguments(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The arguments of the module, of the inputs of a graph."""
        derived = (*self._lengths.values(), ATTENTION_MASK)
        arguments = {
            self._names.get(name, name): values for name, values in inputs.items() if name not in derived
        }
        real = next((values.dtype for values in inputs.values() if values.is_floating_point()), torch.float32)
        for mask in self.masks:
            allowed = self._allowed(mask, inputs)
            if allowed is not None:
                arguments[mask.name] = mask.encoded(allowed, real)
        return {
            name: values.transpose(0, 1) if name in self._batch_second else values
            for name, values in arguments.items()
        }

    def _allowed(self, mask: Mask, inputs: Mapping[str, Tensor]) -> Tensor | None:
        """(B, Tk) or (B, 1, Tq, Tk), True = may attend; None if the module computes the same without."""
        *query, key = mask.sequence_axes
        lengths = inputs.get(self._lengths.get(key, ""))
        if query and ATTENTION_MASK in inputs:
            return inputs[ATTENTION_MASK]
        if mask.optional and (query or lengths is None):
            return None
        rows = inputs[self._rows[key]]
        batch, length = rows.shape[:2]
        if query:
            query_length = inputs[self._rows[query[0]]].shape[1]
            return torch.ones(batch, 1, query_length, length, dtype=torch.bool, device=rows.device)
        if lengths is None:
            return torch.ones(batch, length, dtype=torch.bool, device=rows.device)
        return torch.arange(length, device=rows.device) < lengths[:, None]


def call_module(module: nn.Module, arguments: Mapping[str, Tensor], *, positional: bool) -> Any:
    """Calls a module with arguments by name, or by their position."""
    return module(*arguments.values()) if positional else module(**arguments)


# In longer sequences, the tensors that depend on inputs are not followed: they take memory until the end.
MOST_FOLLOWED_ROWS = 64
# The same of batches of a module without a sequence axis, whose sequences may be as large as images.
MOST_FOLLOWED_BATCH = 2
# Operators that read the shape of a tensor, and none of its values.
SHAPE_OPERATORS = {
    "aten::empty_like", "aten::full_like", "aten::ones_like", "aten::zeros_like", "aten::rand_like",
    "aten::randn_like", "aten::new_empty", "aten::new_empty_strided", "aten::new_full", "aten::new_ones",
    "aten::new_zeros",
}  # fmt: skip


class InputValues(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows which tensors depend on the values of inputs while eager PyTorch runs.

    A tensor depends on them if an operator has computed its memory, or a part of it, from one that does.
    """

    supports_higher_order_operators = True

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # By address. Each is kept, so that no other memory gets its address.
        self._memory: dict[int, torch.UntypedStorage] = {}
        self._add(inputs)

    def reach(self, tensor: Tensor) -> bool:
        """Whether a tensor depends on the values of inputs."""
        return tensor.untyped_storage()._cdata in self._memory

    def _add(self, results: Any) -> None:
        for result in tree_leaves(results):
            if isinstance(result, Tensor):
                memory = result.untyped_storage()
                self._memory[memory._cdata] = memory

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Calls an operator. In-place ones return the tensor that they change."""
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "_schema", func).name  # that of an operator with functions is its own
        tensors = (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
        if name not in SHAPE_OPERATORS and any(map(self.reach, tensors)):
            self._add(result)
        return result


# How Python reads a number of a tensor.
NUMBERS_OF_TENSORS = (
    torch.Tensor.__bool__, torch.Tensor.item, torch.Tensor.__int__, torch.Tensor.__float__,
    torch.Tensor.__index__,
)  # fmt: skip


class TracedCalls(StandardViews):
    """Records the decisions of branches while eager PyTorch runs, and repeats them in a trace.

    A branch on the values of tensors that decides the same for every input and length is a constant of the
    module, and the tracer is told its decision; so is a number that Python reads of a tensor, as `x.item()`.
    Operators that the exporter does not know in every form are replaced. The parity report proves the graph.

    Attributes:
        decisions: By place of a branch such as `if mask.all()`, what it has decided.
        of_inputs: The branches that depend on values of inputs: by place, the line of the user's code.
        is_needed: Whether a trace without this differs.
    """

    def __init__(self) -> None:
        super().__init__()
        self.decisions: Mapping[Place, set[Any]] = defaultdict(set)
        self.of_inputs: dict[Place, Place] = {}
        self._values: InputValues | None = None

    def following(self, inputs: Sequence[Tensor], *, is_small: bool) -> ExitStack:
        """Records, or repeats in a trace, the branches of one call with inputs, while the block runs.

        What depends on their values is followed if the call is small.
        """
        stack = ExitStack()
        self._values = InputValues(inputs) if is_small else None
        if self._values is not None:
            stack.enter_context(self._values)
        # Without it, flex_attention calls a compiler, which a trace cannot follow.
        stack.enter_context(patch.object(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", new=True))
        stack.enter_context(self)
        return stack

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Calls an operator; decides a branch."""
        options = kwargs or {}
        if func in REPLACEMENTS:
            self.is_needed = True
            return (REPLACEMENTS[func] if torch.compiler.is_exporting() else func)(*args, **options)
        if func not in NUMBERS_OF_TENSORS:
            return super().__torch_function__(func, types, args, options)
        place = innermost_place()
        decisions = self.decisions[place]
        if torch.compiler.is_exporting():
            return next(iter(decisions)) if len(decisions) == 1 else func(*args)
        self.is_needed = True
        decision = func(*args)
        decisions.add(decision)
        if self._values is not None and self._values.reach(args[0]):
            if func is torch.Tensor.__bool__:
                self.of_inputs.setdefault(place, user_place() or place)
            else:
                decisions.add(None)  # no number of the trace
        return decision

    @property
    def undecided(self) -> list[Place]:
        """Branches that depend on the inputs or on their lengths."""
        return [place for place, decisions in self.decisions.items() if len(decisions) > 1]

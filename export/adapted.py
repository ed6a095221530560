"""Adapts a module to its graphs: other names, masks made of lengths, and what a tracer cannot follow.

Shapes: B batch, H heads, T rows of a sequence, Tq query rows, Tk key rows, d width of a head.
"""

import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from attention_serving.artifact.manifest import ATTENTION_MASK, KEY_LENGTHS, QUERY_LENGTHS


class Meaning(StrEnum):
    """What the elements of a mask say."""

    HIDES = "True hides"
    """As `key_padding_mask` and `attn_mask` of nn.MultiheadAttention. Of other types, 1 hides."""
    ATTENDS = "True attends"
    """As `attention_mask` of Hugging Face, and boolean masks of scaled_dot_product_attention."""
    ADDED = "added"
    """Real numbers that are added to the scores: 0 attends, -inf hides."""


@dataclass(frozen=True, kw_only=True)
class Mask:
    """A mask that a module takes. Its graphs take lengths or `attention_mask` in its place.

    Attributes:
        name: The parameter of the module.
        axes: Names of the batch and of one or two sequence axes; sizes of all others.
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
        dtype = real if self.dtype.is_floating_point else self.dtype
        batch, *lengths = allowed.shape
        named = iter([batch, *lengths[-len(self.sequence_axes) :]])
        own = allowed.reshape([next(named) if isinstance(axis, str) else 1 for axis in self.axes])
        own = own.expand([-1 if isinstance(axis, str) else axis for axis in self.axes])
        if self.meaning is Meaning.ADDED:
            zeros = torch.zeros((), dtype=dtype, device=own.device)
            return torch.where(own, zeros, float("-inf"))
        return (~own if self.meaning is Meaning.HIDES else own).to(dtype)


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
    ) -> None:
        """Wraps a module.

        Args:
            module: The module.
            rows: By sequence axis, an input (B, T, ...) that has it.
            lengths: By sequence axis, the input that holds its lengths.
            masks: What the module takes and its graphs do not.
            parameters: By input, the parameter of the module if its name differs.
        """
        super().__init__()
        self.module = module
        self.masks = tuple(masks)
        self.calls = TracedCalls()
        self._rows = dict(rows)
        self._lengths = dict(lengths)
        self._names = dict(parameters or {})

    def forward(self, **inputs: Tensor) -> object:
        """Calls the module; without lengths or `attention_mask`, every row may be attended to."""
        made = (KEY_LENGTHS, QUERY_LENGTHS, ATTENTION_MASK)
        given = {self._names.get(name, name): own for name, own in inputs.items() if name not in made}
        real = next((own.dtype for own in inputs.values() if own.is_floating_point()), torch.float32)
        for mask in self.masks:
            allowed = self._allowed(mask, inputs)
            if allowed is not None:
                given[mask.name] = mask.encoded(allowed, real)
        with self.calls:
            return self.module(**given)

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


# File and line of a branch.
Place = tuple[str, int]
WITH_HEADS = 4  # (B, H, T, d)


class TracedCalls(TorchFunctionMode):
    """Records the decisions of branches while eager PyTorch runs, and repeats them in a trace.

    A branch on the values of tensors that decides the same for every input and length is a constant of the
    module, and the tracer is told its decision. Attention without heads is traced as that of one head. The
    parity report proves the graph.

    Attributes:
        decisions: By place of a branch such as `if mask.all()`, what it has decided.
        is_needed: Whether a trace without this differs.
    """

    def __init__(self) -> None:
        super().__init__()
        self.decisions: Mapping[Place, set[bool]] = defaultdict(set)
        self.is_needed = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Calls an operator; decides a branch."""
        named = kwargs or {}
        if func is F.scaled_dot_product_attention and (*args, named.get("query"))[0].ndim < WITH_HEADS:
            self.is_needed = True
            return _with_heads(*args, **named)
        if func is not torch.Tensor.__bool__:
            return func(*args, **named)
        known = self.decisions[_place()]
        if torch.compiler.is_exporting():
            return next(iter(known)) if len(known) == 1 else func(*args)
        self.is_needed = True
        decided = bool(func(*args))
        known.add(decided)
        return decided

    @property
    def undecided(self) -> list[Place]:
        """Branches that depend on the inputs or on their lengths."""
        return [place for place, known in self.decisions.items() if len(known) > 1]


def _with_heads(query: Any, key: Any, value: Any, attn_mask: Any = None, *options: Any, **named: Any) -> Any:
    """Attention over (B, T, d) as attention of one head: the exporter knows no other form."""
    mask = named.pop("attn_mask", attn_mask)
    query, key, value = (rows.unsqueeze(-3) for rows in (query, key, value))
    if mask is not None and mask.ndim > 2:  # noqa: PLR2004 - (Tq, Tk) has no batch
        mask = mask.unsqueeze(-3)
    return F.scaled_dot_product_attention(query, key, value, mask, *options, **named).squeeze(-3)


def _place() -> Place:
    """The innermost line that is not part of PyTorch's dispatch of operators."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename.endswith(("overrides.py", "_tensor.py")):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno

"""What a tracer cannot follow by itself: branches on the values of tensors, and attention without heads.

Runs in eager PyTorch record what each branch decides. A branch that decides the same for every input and
length is a constant of the module, and the tracer is told its decision. The parity report proves the graph.
"""

import sys
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

# File and line of a branch.
Place = tuple[str, int]
WITH_HEADS = 4  # (B, H, T, d)


class TracedCalls(TorchFunctionMode):
    """Records the decisions of branches while eager PyTorch runs, and repeats them in a trace.

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

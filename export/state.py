"""What a module keeps between calls: its buffers and attributes, and the lines that write them."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from attention_serving.export.assumptions import Place, user_place

CONTAINERS = ("_buffers", "_modules", "_parameters")
INTERNAL = frozenset(vars(nn.Module()))


class ModuleState:
    """The buffers and attributes of a module and of its parts at one time, without its parameters.

    Tensors are copied, so that one that is changed in place is noticed and can be restored.
    """

    def __init__(self, module: nn.Module, *, copy: bool = True) -> None:
        """Reads the state.

        Args:
            module: The module.
            copy: Whether tensors are copied.
        """
        self._module, self._copy = module, copy
        self._parts = {path: (part, _attributes(part, copy=copy)) for path, part in module.named_modules()}

    def restore(self) -> None:
        """Gives the module this state again."""
        for part, attributes in self._parts.values():
            for name in vars(part).keys() - attributes.keys():
                del vars(part)[name]
            for name, value in attributes.items():
                if name in CONTAINERS:
                    container = vars(part)[name]
                    container.clear()
                    copies = self._copy and name == "_buffers"
                    container.update(_clone(value, copy=copies))
                else:
                    vars(part)[name] = _clone(value, copy=self._copy)

    def changes(self) -> dict[str, Any]:
        """By path of an attribute, its value in this state, if the module has another one now."""
        now, before = _flat(ModuleState(self._module, copy=False)._parts), _flat(self._parts)
        names = [name for name in before.keys() | now.keys() if not _equal(before.get(name), now.get(name))]
        return {name: before.get(name) for name in sorted(names)}


def _attributes(part: nn.Module, *, copy: bool) -> dict[str, Any]:
    return {
        name: dict(value) if name in ("_modules", "_parameters") else _clone(value, copy=copy)
        for name, value in vars(part).items()
    }


def _clone(value: Any, *, copy: bool) -> Any:
    """A value with other lists and dicts, and copies of their tensors."""
    return tree_map(lambda leaf: leaf.detach().clone() if copy and type(leaf) is Tensor else leaf, value)


def _flat(parts: Mapping[str, tuple[nn.Module, Mapping[str, Any]]]) -> dict[str, Any]:
    values = dict[str, Any]()
    for path, (_, attributes) in parts.items():
        prefix = f"{path}." if path else ""
        flat = {**attributes, **attributes["_buffers"]}
        values |= {f"{prefix}{name}": value for name, value in flat.items() if name not in INTERNAL}
    return values


def _equal(first: Any, second: Any) -> bool:
    firsts, seconds = tree_leaves(first), tree_leaves(second)
    return len(firsts) == len(seconds) and all(map(_equal_leaves, firsts, seconds))


def _equal_leaves(first: Any, second: Any) -> bool:
    if first is second:
        return True
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return (first.shape, first.dtype) == (second.shape, second.dtype) and bool(
            torch.equal(first.nan_to_num(), second.nan_to_num())
        )
    plain = (int, float, str, bool, type(None))
    # Objects of other types are compared by identity above, and taken for equal if they are of one type.
    return first == second if isinstance(first, plain) else type(first) is type(second)


class Writes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the lines of a module that change tensors in place or set attributes.

    Attributes:
        places: By name of a tensor or attribute, the first line that changes it.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.places: dict[str, Place] = {}
        self._names = {tensor.untyped_storage()._cdata: name for name, tensor in tensors.items()}

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Records while the block runs."""
        original = nn.Module.__setattr__

        def set_attribute(part: nn.Module, name: str, value: Any) -> None:
            self._record(name)
            original(part, name, value)

        with patch.object(nn.Module, "__setattr__", set_attribute), self:
            yield

    def _record(self, name: str) -> None:
        place = user_place()
        if place is not None:
            self.places.setdefault(name, place)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Calls an operator. Those that change a tensor state it in their schema."""
        schema: Sequence[Any] = getattr(getattr(func, "_schema", None), "arguments", ())
        for argument, value in zip(schema, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write and isinstance(value, Tensor):
                name = self._names.get(value.untyped_storage()._cdata)
                if name is not None:
                    self._record(name)
        return func(*args, **(kwargs or {}))

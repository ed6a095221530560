"""Which operators of a session the runtime left on the host's processor. Does not import ONNX Runtime.

Operators that a device lacks run on the host, and their tensors are copied there and back in every run.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

# They compute with sizes of tensors, for which the runtime prefers the host. They take a few numbers, and are
# not a reason for a warning.
SHAPE_OPERATORS = frozenset(
    {
        "Shape",
        "Size",
        "Gather",
        "Slice",
        "Concat",
        "Squeeze",
        "Unsqueeze",
        "Add",
        "Sub",
        "Mul",
        "Div",
        "Min",
        "Max",
        "Range",
        "Cast",
        "Identity",
        "Constant",
    }
)


class AssignedNode(Protocol):
    """An operator of a graph, as the runtime describes it."""

    @property
    def name(self) -> str:
        """Its name in the graph."""

    @property
    def op_type(self) -> str:
        """Its kind, such as MatMul."""


class AssignedSubgraph(Protocol):
    """Operators that run on one execution provider, as the runtime describes them."""

    @property
    def ep_name(self) -> str:
        """ONNX Runtime's name of the provider."""

    def get_nodes(self) -> Iterable[AssignedNode]:
        """The operators."""


class HostNodes(NamedTuple):
    """The operators that run on the host.

    Attributes:
        shapes: Kind and name of those that compute with sizes only, as far as their kinds tell.
        tensors: Kind and name of all others. There should be none.
    """

    shapes: Sequence[str] = ()
    tensors: Sequence[str] = ()


def left_on_host(assigned: Iterable[AssignedSubgraph], provider: str) -> HostNodes:
    """The operators of a session that do not run on its provider.

    Args:
        assigned: What the runtime assigned to which provider.
        provider: ONNX Runtime's name of the provider that should run everything.
    """
    found: dict[bool, list[str]] = {True: [], False: []}
    for subgraph in assigned:
        if subgraph.ep_name == provider:
            continue
        for node in subgraph.get_nodes():
            found[node.op_type in SHAPE_OPERATORS].append(f"{node.op_type} {node.name}".rstrip())
    return HostNodes(found[True], found[False])

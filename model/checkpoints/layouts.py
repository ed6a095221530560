"""The layouts: under which names other projects keep the weights of attention.

A layout maps the parameters of `MultiHeadAttention` to names in a file. Whatever else stands under the prefix
is a known neighbour, which is left out and reported, or an error.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Final

from torch import Tensor

from model.checkpoints.errors import CheckpointError

Shape = tuple[int, ...]
FUSED: Final = "projections.fused"
QUERY, KEY, VALUE = "projections.query", "projections.key", "projections.value"
OUTPUT: Final = "output"
_QKV_BIASES: Final = "projections.*.bias"


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where the file keeps one parameter."""

    name: str
    transposed: bool = False
    """The file keeps a matrix as (in, out), rather than nn.Linear's (out, in)."""
    third: int | None = None
    """Which of three equal parts along the first axis it is; all of the tensor where None."""

    def cut(self, stored: Tensor) -> Tensor:
        """The parameter, out of the tensor of the file."""
        stored = stored.T if self.transposed and stored.ndim > 1 else stored
        return stored if self.third is None else stored.chunk(3)[self.third]

    def shape_here(self, stored: Shape) -> Shape:
        """Shape of the parameter, by that of the tensor in the file."""
        stored = stored[::-1] if self.transposed else stored
        return stored if self.third is None or not stored else (stored[0] // 3, *stored[1:])

    def shape_in_file(self, shape: Shape) -> Shape:
        """Shape of the tensor in the file, by that of the parameter."""
        shape = shape if self.third is None else (3 * shape[0], *shape[1:])
        return shape[::-1] if self.transposed else shape


Sources = Mapping[str, Source]  # by the parameter's name


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Names, and what they say about sizes and rules."""

    variants: tuple[Sources, ...]
    """Alternatives; that of which the file holds most counts."""
    optional: tuple[str, ...] = ()
    """Patterns of parameters: those of one pattern are all there, or none is."""
    neighbours: tuple[str, ...] = ()
    """Patterns of names beside attention, which are left out."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Patterns of names that change what attention computes, in ways not served here, and how."""
    square: bool = True
    """Whether heads * d_k is the width of the query, and as many key and value heads as query heads."""
    own_widths: bool = False
    """Whether key and value may be of other widths than the query, and so tell cross-attention."""
    causal: bool = False
    """Whether it is always causal, and self-attention."""
    rotary: bool = False
    """Whether rotary position embedding is applied, to pairs half a head apart."""

    def choose(self, names: Collection[str], *, cross: bool) -> Sources:
        """The variant that a file of these names holds, without the optional parameters it lacks."""

        def rank(variant: Sources) -> tuple[int, bool]:
            held = {source.name for source in variant.values()} & set(names)
            return len(held), not (cross and f"{FUSED}.weight" in variant)

        best: Sources = max(self.variants, key=rank)  # of equals the first
        chosen = dict(best)
        for pattern in self.optional:
            group = {
                ours: source.name in names for ours, source in chosen.items() if fnmatchcase(ours, pattern)
            }
            if not any(group.values()):
                chosen = {ours: source for ours, source in chosen.items() if ours not in group}
        return chosen

    def is_neighbour(self, name: str) -> bool:
        """Whether a name stands beside attention."""
        return any(fnmatchcase(name, pattern) for pattern in self.neighbours)

    def refusal(self, name: str) -> str:
        """Why a name that is neither attention's nor a neighbour's is refused."""
        reasons = (why for pattern, why in self.refused.items() if fnmatchcase(name, pattern))
        return next((f"{why}, which is not supported" for why in reasons), "unexpected")


def _linear(**layers: str) -> Sources:
    """Layers of the file, each of a weight and a bias, for query, key, value or fused, and output."""
    parameters = {}
    for ours, theirs in layers.items():
        ours_here = OUTPUT if ours == "output" else f"projections.{ours}"
        for kind in ("weight", "bias"):
            parameters[f"{ours_here}.{kind}"] = Source(name=f"{theirs}.{kind}")
    return parameters


def _conv1d(**layers: str) -> Sources:
    """As `_linear`, of layers that keep their weight as (in, out)."""
    return {
        ours: Source(name=source.name, transposed=ours.endswith("weight"))
        for ours, source in _linear(**layers).items()
    }


def _thirds(kind: str, name: str) -> Sources:
    """Query, key and value in one tensor."""
    return {f"{ours}.{kind}": Source(name=name, third=i) for i, ours in enumerate((QUERY, KEY, VALUE))}


_TORCH_OUTPUT = _linear(output="out_proj")
_TORCH = Layout(
    variants=(
        {
            f"{FUSED}.weight": Source(name="in_proj_weight"),
            f"{FUSED}.bias": Source(name="in_proj_bias"),
            **_TORCH_OUTPUT,
        },
        {**_thirds("weight", "in_proj_weight"), **_thirds("bias", "in_proj_bias"), **_TORCH_OUTPUT},
        {
            f"{QUERY}.weight": Source(name="q_proj_weight"),
            f"{KEY}.weight": Source(name="k_proj_weight"),
            f"{VALUE}.weight": Source(name="v_proj_weight"),
            **_thirds("bias", "in_proj_bias"),
            **_TORCH_OUTPUT,
        },
    ),
    optional=(_QKV_BIASES, "output.bias"),
    refused={"bias_[kv]": "appends a learnt key and value to every sequence"},
    own_widths=True,
)
_BERT = Layout(
    variants=(_linear(query="self.query", key="self.key", value="self.value", output="output.dense"),),
    neighbours=("output.LayerNorm.*",),
    refused={"self.distance_embedding.*": "adds a term for the distance of two rows to the scores"},
)
_GPT2 = Layout(
    variants=(_conv1d(fused="c_attn", output="c_proj"),),
    neighbours=("bias", "masked_bias"),
    refused={"q_attn.*": "belongs to GPT-2's cross-attention"},
    causal=True,
)
_LLAMA = Layout(
    variants=(_linear(query="q_proj", key="k_proj", value="v_proj", output="o_proj"),),
    optional=(_QKV_BIASES, "output.bias"),
    neighbours=("rotary_emb.inv_freq",),
    refused={
        "[qk]_norm.*": "normalises queries and keys before their product",
        "sinks": "adds a learnt score to every row's softmax",
    },
    square=False,
    causal=True,
    rotary=True,
)
_VIT = Layout(
    variants=(
        _linear(query="attention.query", key="attention.key", value="attention.value", output="output.dense"),
        # The names in memory, since version 5 of transformers.
        _linear(query="q_proj", key="k_proj", value="v_proj", output="o_proj"),
    ),
    optional=(_QKV_BIASES,),
)
_CLIP = Layout(variants=(_linear(query="q_proj", key="k_proj", value="v_proj", output="out_proj"),))
_GENERIC = Layout(
    variants=(
        _linear(query=QUERY, key=KEY, value=VALUE, output=OUTPUT),
        _linear(fused=FUSED, output=OUTPUT),
    ),
    optional=(_QKV_BIASES, "output.bias", "output.*"),
    square=False,
    own_widths=True,
)

LAYOUTS: Final[Mapping[str, Layout]] = MappingProxyType(
    {
        "bert": _BERT,
        "clip": _CLIP,
        "generic": _GENERIC,
        "gpt2": _GPT2,
        "llama": _LLAMA,
        "torch": _TORCH,
        "vit": _VIT,
    }
)


def find_layout(name: str) -> Layout:
    """A layout by name.

    Raises:
        CheckpointError: There is none of that name; the message lists those there are.
    """
    if name not in LAYOUTS:
        raise CheckpointError(f"layout {name!r} does not exist; there are: {', '.join(sorted(LAYOUTS))}")
    return LAYOUTS[name]

"""Layouts: the names that other projects give to the weights of attention.

A layout maps the parameters of `MultiHeadAttention` to names in a file. Other names under the prefix are
either known neighbours, which are skipped and reported, or errors. To add a layout, write a `Layout` and
list it in `LAYOUTS`.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from torch import Tensor

Shape = tuple[int, ...]
FUSED: Final = "projections.fused"
QUERY, KEY, VALUE = "projections.query", "projections.key", "projections.value"
OUTPUT: Final = "output"
_QKV_BIASES: Final = "projections.*.bias"


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """How a file stores one parameter."""

    name: str
    transposed: bool = False
    """The file stores a matrix as (in, out); nn.Linear stores (out, in)."""
    part: int = 0
    """Index of the parameter among the equal parts of the tensor along the first axis."""
    parts: int = 1
    """Number of those parts; 1 if the tensor is the parameter."""

    def cut(self, stored: "Tensor") -> "Tensor":
        """The parameter, from the tensor of the file."""
        stored = stored.T if self.transposed and stored.ndim > 1 else stored
        return stored if self.parts == 1 else stored.chunk(self.parts)[self.part].contiguous()

    def shape_here(self, stored: Shape) -> Shape:
        """Shape of the parameter, from the shape of the tensor in the file."""
        stored = stored[::-1] if self.transposed else stored
        return (stored[0] // self.parts, *stored[1:]) if stored else stored

    def shape_in_file(self, shape: Shape) -> Shape:
        """Shape of the tensor in the file, from the shape of the parameter."""
        shape = (self.parts * shape[0], *shape[1:])
        return shape[::-1] if self.transposed else shape


StoredTensors = Mapping[str, StoredTensor]  # by the parameter's name


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The names of one project, and what follows from them about sizes and rules."""

    variants: tuple[StoredTensors, ...]
    """Alternatives. The one with the most names in the file is used."""
    optional: tuple[str, ...] = ()
    """Patterns of parameters. The file holds all parameters of a pattern, or none."""
    neighbours: tuple[str, ...] = ()
    """Patterns of names that are not part of attention, which are skipped."""
    square: bool = True
    """Whether heads * d_k is the query's width, and all of query, key and value have the same heads."""
    own_widths: bool = False
    """Whether key and value may have other widths than the query, which then means cross-attention."""
    causal: bool = False
    """Whether it is always causal self-attention."""
    rotary: bool = False
    """Whether rotary position embedding is applied, to pairs half a head apart."""

    def choose(self, names: Collection[str], *, cross: bool) -> StoredTensors:
        """The variant of a file with these names, without the optional parameters that it lacks."""

        def rank(variant: StoredTensors) -> tuple[int, bool]:
            matches = {source.name for source in variant.values()} & set(names)
            return len(matches), not (cross and f"{FUSED}.weight" in variant)

        chosen: StoredTensors = max(self.variants, key=rank)  # the first of equals
        for pattern in self.optional:
            group = [ours for ours in chosen if fnmatchcase(ours, pattern)]
            if not any(chosen[ours].name in names for ours in group):
                chosen = {ours: source for ours, source in chosen.items() if ours not in group}
        return chosen

    def is_neighbour(self, name: str) -> bool:
        """Whether a name is known and not part of attention."""
        return any(fnmatchcase(name, pattern) for pattern in self.neighbours)


def _linear(**layers: str) -> StoredTensors:
    """Names of layers with weight and bias, by query, key, value or fused, and output."""
    names = {OUTPUT if ours == "output" else f"projections.{ours}": theirs for ours, theirs in layers.items()}
    return {
        f"{ours}.{kind}": StoredTensor(name=f"{theirs}.{kind}")
        for ours, theirs in names.items()
        for kind in ("weight", "bias")
    }


def _conv1d(**layers: str) -> StoredTensors:
    """As `_linear`, for layers that store their weight as (in, out)."""
    return {
        ours: StoredTensor(name=source.name, transposed=ours.endswith("weight"))
        for ours, source in _linear(**layers).items()
    }


def _thirds(kind: str, name: str) -> StoredTensors:
    """Query, key and value in one tensor."""
    parts = enumerate((QUERY, KEY, VALUE))
    return {f"{ours}.{kind}": StoredTensor(name=name, part=index, parts=3) for index, ours in parts}


_TORCH_OUTPUT = _linear(output="out_proj")
_TORCH = Layout(
    variants=(
        {
            f"{FUSED}.weight": StoredTensor(name="in_proj_weight"),
            f"{FUSED}.bias": StoredTensor(name="in_proj_bias"),
            **_TORCH_OUTPUT,
        },
        {**_thirds("weight", "in_proj_weight"), **_thirds("bias", "in_proj_bias"), **_TORCH_OUTPUT},
        {
            f"{QUERY}.weight": StoredTensor(name="q_proj_weight"),
            f"{KEY}.weight": StoredTensor(name="k_proj_weight"),
            f"{VALUE}.weight": StoredTensor(name="v_proj_weight"),
            **_thirds("bias", "in_proj_bias"),
            **_TORCH_OUTPUT,
        },
    ),
    optional=(_QKV_BIASES, "output.bias"),
    own_widths=True,
)
_BERT = Layout(
    variants=(_linear(query="self.query", key="self.key", value="self.value", output="output.dense"),),
    neighbours=("output.LayerNorm.*",),
)
_GPT2 = Layout(
    variants=(_conv1d(fused="c_attn", output="c_proj"),), neighbours=("bias", "masked_bias"), causal=True
)
_LLAMA = Layout(
    variants=(_linear(query="q_proj", key="k_proj", value="v_proj", output="o_proj"),),
    optional=(_QKV_BIASES, "output.bias"),
    neighbours=("rotary_emb.inv_freq",),
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
    variants=(_linear(query=QUERY, key=KEY, value=VALUE, output=OUTPUT), _linear(fused=FUSED, output=OUTPUT)),
    optional=(_QKV_BIASES, "output.bias", "output.*"),
    square=False,
    own_widths=True,
)

LAYOUTS: Final[Mapping[str, Layout]] = {
    "bert": _BERT,
    "clip": _CLIP,
    "generic": _GENERIC,
    "gpt2": _GPT2,
    "llama": _LLAMA,
    "torch": _TORCH,
    "vit": _VIT,
}

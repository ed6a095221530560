"""Random attention modules of the parts in tests/data/module_grammar.toml, as sources that can be run."""

import math
import re
import runpy
import string
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from attention_serving.export import export_module
from scripts.local_server import ROOT
from tests.support.eager import Array

_T = TypeVar("_T")
GRAMMAR = tomllib.loads((ROOT / "tests/data/module_grammar.toml").read_text())
PARTS, OUTPUTS, FIXED = GRAMMAR["parts"], GRAMMAR["outputs"], GRAMMAR["fixed"]
GROUPS = {part: group for table in (OUTPUTS, PARTS) for group, parts in table.items() for part in parts}
MIXING = ("mixing", "far", "odd", "further_mixing", "multiple")
READS_HIDDEN = {part for part, group in GROUPS.items() if group in MIXING}
TRAITS = {"odd", "guard", "value", "multiple", "state"}
# Lengths at which modules branch, and those of long sequences.
BRANCHES, LONG = (1, 4, 10, 64, 300, 520, 700, 1024), (97, 211, 509, 600, 1021, 1030, 1500)
LARGEST, SMALL_LARGEST = 1600, 96
EXAMPLE_LENGTHS, MULTIPLE = {"t0": 6, "t1": 9, "t2": 5, "t3": 7}, 4
# Results in other forms than a tuple, and the element types of weights.
FORMS = ("{}", "{}", "[[{}], None]", "dict(rows=({},))", "dict(state=None, nested=dict(y=[{}]))")
TYPES = (*[torch.float32] * 4, torch.float16, torch.bfloat16, torch.float64)
SOURCE = """import math

import torch
import torch.nn.functional as F
from torch import nn
{classes}

def turn(x):
    return x.transpose(0, 1) if x.ndim > 2 else x


class Random(nn.Module):
    def __init__(self):
        super().__init__()
        {layers}

    def forward({arguments}):
        {lines}
        return {outputs}
"""


def random_rows(kind: str, length: int, rng: np.random.Generator, values: str = "usual") -> Array:
    """One sequence of an input: usual values, large ones, zeros, or a NaN among usual ones."""
    if kind in ("ids", "flags"):
        return rng.integers(0, 20, length) if kind == "ids" else rng.random(length) < 0.5
    factor = {"large": 300, "zeros": 0}.get(values, 1)
    if kind == "id":
        return np.array(rng.integers(0, 20))
    if kind in FIXED:
        return np.array(rng.standard_normal(FIXED[kind][0]) * factor, np.float32)
    if kind == "gaps":
        return (rng.uniform(0.5, 50, length) * max(factor, 1)).astype(np.float32)
    rows = rng.random((length, 8)) * 255 if kind == "pixels" else rng.standard_normal((length, 8))
    if values == "NaN":
        rows[length // 2, 3] = np.nan
    return (rows * factor).astype(np.float32)


@dataclass(frozen=True)
class Mask:
    """An input that is a mask: of keys, or of query and key rows."""

    name: str
    meaning: str
    axes: tuple[str, ...]
    heads: tuple[int, ...] = ()
    optional: bool = False

    def encode(self, allowed: Tensor) -> Tensor:
        """What the module takes (B, ...), from booleans (Tk,) or (Tq, Tk), True = may attend."""
        allowed = allowed.expand(1, *self.heads, *allowed.shape)
        if self.meaning.startswith("lengths"):
            return allowed.sum(1)
        if self.meaning == "added":
            return torch.where(allowed, 0.0, -math.inf)
        return allowed if self.meaning == "True attends" else ~allowed


class RandomModule:
    """The module of a seed.

    Attributes:
        inputs: By name, kind and axis.
        fixed: The same of inputs without rows, by name the kind.
        traits: What an export may refuse it for: "leaky", "odd", "guard", "value", "multiple" or "state".
        branches: By axis, the lengths at which it may compute something else.
        sizes: By axis, the length in the example.
        fixed_axes: Those whose length is that of the example in every sequence.
        finds_axes: Whether the export finds the axes, and what masks mean.
        batch_second: Whether it takes and returns (T, B, ...).
    """

    def __init__(self, seed: int) -> None:
        self.seed, self.name = seed, f"random-{seed}"
        self.rng = rng = np.random.default_rng(seed)
        axes = [f"t{at}" for at in range(1 + rng.choice(4, p=[0.3, 0.35, 0.2, 0.15]))]
        order = axes + [self._pick(axes) for _ in range(min(self._pick([0, 0, 1, 2]), 4 - len(axes)))]
        kinds = rng.choice([*GRAMMAR["inputs"]], len(order), p=[0.6, 0.1, 0.15, 0.1, 0.05])
        self.inputs = {
            f"x{at}": (str(kinds[at]), order[i]) for at, i in enumerate(rng.permutation(len(order)))
        }
        meanings = [*GRAMMAR["masks"]]
        self.masks = [
            Mask(f"{axis}_{GRAMMAR['masks'][meaning][0]}", meaning, (axis,), optional=rng.random() < 0.3)
            for axis, meaning in zip(axes, rng.choice(meanings, len(axes)), strict=True)
            if rng.random() < 0.4
        ]
        if rng.random() < 0.25:
            pair, heads = (self._pick(order), self._pick(order)), self._pick([(), (1,), (2,)])
            self.masks.append(Mask("pair_mask", self._pick(meanings), pair, heads))
        self.masks.sort(key=lambda mask: mask.optional)
        self.max_length = self._pick([*[LARGEST] * 15, *[SMALL_LARGEST] * 4, None])
        self.branches: dict[str, set[int]] = {axis: set() for axis in axes}
        self.traits: set[str] = set()
        self.layers: list[str] = []
        self.streams = {name.replace("x", "h"): axis for name, (_, axis) in self.inputs.items()}
        self.lines = self._opening()
        self.outputs = self._compose(1 + seed % 4)
        self.rng = np.random.default_rng((seed, 1))  # so that what is above stays the same
        self._extend(axes)

    def _pick(self, options: Sequence[_T]) -> _T:
        return options[int(self.rng.integers(len(options)))]

    def _extend(self, axes: Sequence[str]) -> None:
        """Adds inputs without rows, further parts and outputs; chooses how it is called and exported."""
        stream = self._pick([*self.streams])
        self.fixed = {f"f{at}": self._pick([*FIXED]) for at in range(self._pick([0, 0, 1, 2]))}
        for name, kind in self.fixed.items():
            self.lines.append(self._hoist(FIXED[kind][1], self._fields(stream, stream) | {"f": name}))
        for _ in range(self._pick([0, 1, 2])):
            self.lines += self._part(self._further(PARTS, "state"), stream)
        for _ in range(self._pick([1, 1, 2])):
            self.outputs += self._part(self._further(OUTPUTS), stream)
        self.masks = [self._counted(mask) for mask in self.masks]
        self.form, self.dtype = self._pick(FORMS), self._pick(TYPES)
        self.finds_axes, self.batch_second = (bool(self.rng.random() < part) for part in (0.5, 0.2))
        step = MULTIPLE if "multiple" in self.traits else 1
        usual = {
            axis: self._pick([3, 5, 6, 8, 9]) if self.finds_axes else EXAMPLE_LENGTHS[axis] for axis in axes
        }
        self.sizes = {axis: step * size for axis, size in usual.items()}
        self.batch = self._pick([1, 2, 3]) if self.finds_axes else 2
        masked = {axis for mask in self.masks for axis in mask.axes}
        self.fixed_axes = {
            axis
            for axis in axes
            if self.rng.random() < 0.15 and not (axis in masked or self.finds_axes or self.batch_second)
        }

    def _counted(self, mask: Mask) -> Mask:
        """Lengths that the module makes its mask of, in place of some masks of keys."""
        if len(mask.axes) > 1 or mask.optional or self.rng.random() < 0.7:
            return mask
        axis = mask.axes[0]
        rows = next(name for name, (_, axis_of_rows) in self.inputs.items() if axis_of_rows == axis)
        attends = f"torch.arange({rows}.shape[1]) < {axis}_len[:, None]"
        forms = {"added": f"torch.where({attends}, 0.0, -math.inf)", "True hides": f"~({attends})"}
        self.lines.insert(0, f"{mask.name} = {forms.get(mask.meaning, attends)}")
        return Mask(f"{axis}_len", f"lengths of {axis}", mask.axes)

    def _further(self, groups: Mapping[str, list[str]], *rare: str) -> list[str]:
        """Parts of groups: usually of rows and mixing, or of a rare one."""
        if self.rng.random() < 0.2:
            return groups[self._pick(["multiple", *rare])]
        return groups["further_rows"] + groups["further_mixing"]

    def _opening(self) -> list[str]:
        lines = []
        for name, (kind, axis) in self.inputs.items():
            is_raw = kind == "rows" and self.rng.random() < 0.4
            rows = name if is_raw else self._hoist(GRAMMAR["inputs"][kind], {"x": name})
            lines.append(f"{name.replace('x', 'h')} = {rows}")
            for mask in self.masks:
                if mask.optional and mask.axes == (axis,):
                    attends = f"torch.full({name}.shape[:2], {GRAMMAR['masks'][mask.meaning][1]})"
                    lines.append(f"{mask.name} = {attends} if {mask.name} is None else {mask.name}")
        return lines

    def _compose(self, steps: int) -> list[str]:
        """Adds parts to some streams, then joins all of them in one; returns outputs of that."""
        hostile = self._pick(["guard", "value", "far"]) if self.rng.random() < 0.4 else ""
        main = self._pick([*self.streams])
        for step in range(steps):
            group = self.rng.choice(["rows", "masked", "mixing", "odd"], p=[0.35, 0.4, 0.18, 0.07])
            options = PARTS[hostile if hostile and step == steps - 1 else str(group)]
            self.lines += self._part(options, self._pick([*self.streams]) if step else main)
        joins = [part for group in ("rows", "masked", "mixing") for part in PARTS[group]]
        for stream in self.streams:
            self.lines += self._part(joins, main, stream) if stream != main else []
        outputs = [part for parts in OUTPUTS.values() for part in parts]
        return [self._part(outputs, main)[0] for _ in range(self._pick([1, 1, 2]))]

    def _part(self, options: Sequence[str], stream: str, key: str = "") -> list[str]:
        """One of the parts that apply to a stream, and read another stream if that is named; or none."""
        fields = self._fields(stream, key or self._pick([stream, *self.streams]))
        hidden = {name[0] for name in fields if name.endswith("_hidden")}
        names = {part: {name for _, name, *_ in string.Formatter().parse(part) if name} for part in options}
        fitting = [
            part for part in options if names[part] <= {*fields} and (not key or names[part] & {"k", "p"})
        ]
        leaky = {part for part in fitting if part in READS_HIDDEN and names[part] & hidden}
        if self.rng.random() < 0.93:
            fitting = [part for part in fitting if part not in leaky] or fitting
        if not fitting:
            return []
        part = self._pick(fitting)
        self.traits |= {GROUPS[part]} & TRAITS | ({"leaky"} if part in leaky else set())
        if "size" in names[part] and self.max_length is None:
            self.traits.add("guard")
            self.branches[self.streams[stream]].add(int(fields["size"]))
        if "n" in names[part]:
            self.branches[self.streams[key or stream]].add(int(fields["n"]))
        return [self._hoist(part, fields)]

    def _fields(self, stream: str, key: str) -> dict[str, str]:
        name, axes = stream.replace("h", "x"), (self.streams[stream], self.streams[key])
        branches = [length for length in BRANCHES if length < (self.max_length or LARGEST)]
        fields = {"h": stream, "k": key, "n": str(self._pick(branches)), "d": str(self._pick([1, 2, 4, 9]))}
        fields["size"] = str(self.max_length or 1024)
        if (kind := self.inputs[name][0]) in ("rows", "ids"):
            fields["x" if kind == "rows" else "ids"] = name
        if stream != key and axes[0] == axes[1]:
            fields["p"] = key
        for mask in sorted(self.masks, key=lambda mask: len(mask.axes)):
            _, _, hides, allows = (text.format(m=mask.name) for text in GRAMMAR["masks"][mask.meaning])
            fields |= {
                f: hides
                for f, axis in zip(("h_hidden", "k_hidden"), axes, strict=True)
                if mask.axes == (axis,)
            }
            if mask.axes == axes:
                keys = f" & ~{fields['k_hidden']}[:, None, None]" if "k_hidden" in fields else ""
                fields["pairs"] = f"({allows}{'' if mask.heads else '[:, None]'}{keys})"
        return fields

    def _hoist(self, part: str, fields: dict[str, str]) -> str:
        """A part with its fields, and with layers for what stands in «»."""

        def layer(match: re.Match[str]) -> str:
            self.layers.append(GRAMMAR["layers"].get(match[1], match[1]).format(**fields))
            return f"self.m{len(self.layers) - 1}"

        return re.sub("«(.*?)»", layer, part).format(**fields)

    def __str__(self) -> str:
        inputs = [f"{name} {kind} [{axis}]" for name, (kind, axis) in self.inputs.items()]
        inputs += [f"{name} {kind}" for name, kind in self.fixed.items()]
        inputs += [f"{mask.name} {mask.meaning} {[*mask.axes]}" for mask in self.masks]
        layers = [f"m{at} = {layer}" for at, layer in enumerate(self.layers)]
        lines = "; ".join([*layers, *self.lines, f"return {self._result()}"]).replace("self.", "")
        form = f"{self.dtype}{', axes found' * self.finds_axes}{', (T, B)' * self.batch_second}"
        form += (
            f", example {self.batch} x {self.sizes}, fixed {[*self.fixed_axes]}, max_length={self.max_length}"
        )
        return f"{self.name} {sorted(self.traits)} {form}: {', '.join(inputs)}: {lines}"

    def _kinds(self) -> list[tuple[str, str, str]]:
        """By input, its name, kind and axis, which is empty without rows."""
        rows = [(name, kind, axis) for name, (kind, axis) in self.inputs.items()]
        return rows + [(name, kind, "") for name, kind in self.fixed.items()]

    def batch_axis(self, output: Tensor) -> int:
        """Of an output: the second axis of rows, if the module returns (T, B, ...)."""
        return int(self.batch_second and output.ndim > 2)

    def _result(self) -> str:
        """What it returns."""
        return self.form.format(
            ", ".join(f"turn({output})" if self.batch_second else output for output in self.outputs)
        )

    def build(self, folder: Path) -> nn.Module:
        """The module, whose source is written to a file, because errors of the export name its lines."""
        masks = [f"{mask.name}=None" if mask.optional else mask.name for mask in self.masks]
        path = folder / f"{self.name}.py"
        turns = [f"{name} = {name}.transpose(0, 1)" for name in self.inputs if self.batch_second]
        path.write_text(
            SOURCE.format(
                classes=GRAMMAR["classes"],
                layers="\n        ".join(f"self.m{at} = {layer}" for at, layer in enumerate(self.layers)),
                arguments=", ".join(["self", *self.inputs, *self.fixed, *masks]),
                lines="\n        ".join([*turns, *self.lines]),
                outputs=self._result(),
            )
        )
        torch.manual_seed(self.seed)
        module: nn.Module = runpy.run_path(str(path))["Random"]()
        return module.eval().to(self.dtype)

    def tensors(self, sequences: Mapping[str, Array]) -> dict[str, Tensor]:
        """What the module takes, of sequences (B, ...) by input."""
        tensors = {name: torch.from_numpy(array) for name, array in sequences.items()}
        turned = self.inputs if self.batch_second else ()
        return {name: t.transpose(0, 1) if name in turned else t for name, t in tensors.items()}

    def export(self, folder: Path) -> None:
        """Exports it to the repository of a folder, with an example of usual values."""
        rng, at = np.random.default_rng(self.seed), 1 - self.batch_second
        examples = {
            name: np.stack([random_rows(kind, self.sizes.get(axis, 0), rng) for _ in range(self.batch)])
            for name, kind, axis in self._kinds()
        }
        if not self.finds_axes:
            examples |= {
                name: np.full_like(examples[name], 19) for name, kind, _ in self._kinds() if kind == "ids"
            }
        axes = {
            name: {1 - at: "batch", at: axis}
            for name, (_, axis) in self.inputs.items()
            if axis not in self.fixed_axes
        }
        tensors = self.tensors(examples)
        for mask in self.masks:
            allowed = torch.ones([self.sizes[axis] for axis in mask.axes], dtype=torch.bool)
            tensors[mask.name] = mask.encode(allowed).repeat_interleave(self.batch, 0)
            further_axes = range(1 + len(mask.heads), tensors[mask.name].ndim)  # none of lengths
            axes[mask.name] = {0: "batch"} | dict(zip(further_axes, mask.axes, strict=False))
        export_module(
            self.build(folder),
            {name: t.to(self.dtype) if t.is_floating_point() else t for name, t in tensors.items()},
            None if self.finds_axes else {name: axes.get(name, {0: "batch"}) for name in tensors},
            out=folder / "repository",
            name=self.name,
            output_names=None if self.finds_axes else [f"y{at}" for at in range(len(self.outputs))],
            max_length=self.max_length,
            masks={
                mask.name: mask.meaning
                for mask in self.masks
                if not self.finds_axes or mask.meaning == "added" or len(mask.axes) > 1
            },
            progress=lambda _: None,
        )

    def requests(self) -> Iterator[list[dict[str, Array]]]:
        """Lists of sequences: short ones, long ones, at the lengths of branches, of unusual values."""
        rng, largest = np.random.default_rng(self.seed), self.max_length or LARGEST
        pairs = [mask for mask in self.masks if len(mask.axes) > 1]

        def sequence(least: int, most: int, values: str = "usual", **lengths: int) -> dict[str, Array]:
            sizes = {name: int(rng.integers(least, most + 1)) for name in self.branches}
            sizes |= {axis: self.sizes[axis] for axis in self.fixed_axes} | lengths
            rows = {
                name: random_rows(kind, sizes.get(axis, 0), rng, values) for name, kind, axis in self._kinds()
            }
            for mask in pairs if values == "masked" else []:
                rows["attention_mask"] = rng.random([sizes[axis] for axis in mask.axes]) < 0.6
                rows["attention_mask"][:, 0] = True
            return rows

        for values in ("usual", "masked") if pairs else ("usual",):
            for bounds in ((1, 4), (1, 14), (17, 24), (40, 70)):
                yield [sequence(*bounds, values) for _ in range(4)]
            for axis, branches in self.branches.items():
                near = [length + at for length in branches for at in (-1, 0, 1)]
                lengths = [length for length in (*near, *LONG, largest) if 0 < length <= largest]
                yield [sequence(1, 20, values, **{axis: largest})]
                at, after = ({axis: int(length)} for length in rng.choice(lengths, 2))
                yield [
                    sequence(1, 20, values, **at),
                    sequence(1, 90, values, **after),
                    sequence(1, 20, values),
                ]
        for values in ("large", "zeros", "NaN"):
            yield [sequence(1, 14), sequence(1, 14, values), sequence(10, 30, values)]

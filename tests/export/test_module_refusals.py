"""Modules that cannot be exported as they are: each is told what it does, and what to change."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attention_serving.artifact.manifest import GraphKind
from attention_serving.export import ExportError, export_module
from attention_serving.export.artifact import UNCHANGED

ROWS = {"x": torch.zeros(2, 3, 8)}
ROW_AXES = {0: "batch", 1: "sequence"}
TWO = ROWS | {"memory": torch.zeros(2, 5, 8)}


class Random(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x)


class SequenceFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16)

    def forward(self, x: Tensor) -> Tensor:
        rows: Tensor = self.layer(x)
        return rows


class CrossSequenceFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.MultiheadAttention(8, 2)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        rows: Tensor = self.layer(x, memory, memory)[0]
        return rows


class DecoderSequenceFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerDecoderLayer(8, 2, 16)

    def forward(self, x: Tensor, memory: Tensor, memory_key_padding_mask: Tensor) -> Tensor:
        rows: Tensor = self.layer(x, memory, memory_key_padding_mask=memory_key_padding_mask)
        return rows


class BranchesOnData(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            return x
        return -x


class BranchesOnLength(nn.Module):
    """A graph for lengths up to 8 would give wrong results for longer ones."""

    def forward(self, x: Tensor) -> Tensor:
        return x if x.shape[1] <= 8 else x * 2


class KeepsALength(nn.Module):
    """Knows only the lengths that it was tried with."""

    def forward(self, x: Tensor) -> Tensor:
        return x + (1.0 if x.shape[1] in (3, 5) else 1.01)


class Unknown(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        rows: Tensor = torch.special.bessel_j0(x)
        return rows


class Fails(nn.Module):
    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        return x + memory


class Hides(nn.Module):
    """Its mask means the opposite of what its name says."""

    def forward(self, x: Tensor, key_padding_mask: Tensor) -> Tensor:
        mask = key_padding_mask[:, None, :].expand(-1, x.shape[1], -1)
        return F.scaled_dot_product_attention(x, x, x, attn_mask=mask)


class ReadsPadding(nn.Module):
    """Masks the keys of attention, and then computes a mean of all rows."""

    def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
        return x - x.mean(dim=1, keepdim=True) + attention_mask[..., None].float()


HIDES = ROWS | {"key_padding_mask": torch.zeros(2, 3, dtype=torch.bool)}
MASK = ROWS | {"attention_mask": torch.ones(2, 3, dtype=torch.bool)}
REFUSED: dict[str, tuple[nn.Module, Mapping[str, Tensor], str]] = {
    "random": (Random(), ROWS, "two runs on the same inputs differ; .* training=self.training"),
    "sequence first": (SequenceFirst(), ROWS, r"may take \(sequence, batch, ...\).*batch_first=True"),
    "sequence first, masked": (
        DecoderSequenceFirst(),
        TWO | {"memory_key_padding_mask": torch.zeros(2, 5, dtype=torch.bool)},
        r"the module fails for .*; the module takes \(sequence, batch, ...\).*batch_first=True",
    ),
    "cross, sequence first": (CrossSequenceFirst(), TWO, r"takes \(sequence, batch, ...\).*batch_first=True"),
    "branches on data": (
        BranchesOnData(),
        ROWS,
        r"traced over x \[2, 3, 8\]: the module branches on the values of a tensor, at .*test_module_ref"
        r"usals.py:\d+: if x.sum\(\) > 0",
    ),
    "branches on a length": (BranchesOnLength(), ROWS, "It is equal at .*: the module branches on a length"),
    "keeps a length": (
        KeepsALength(),
        ROWS,
        "computes something else when it is traced. It may branch on a length",
    ),
    "an unknown operator": (Unknown(), ROWS, "the exporter has no ONNX form of .*bessel_j0"),
    "fails": (
        Fails(),
        TWO,
        r"^the module fails for x \[2, 3, 8\], memory \[2, 5, 8\]: RuntimeError: The size",
    ),
    "the opposite mask": (
        Hides(),
        HIDES,
        "depends on rows that key_padding_mask hides; .* masks={'key_padding_mask': 'True attends'}: state",
    ),
    "reads padding": (ReadsPadding(), MASK, "reads these rows in spite of the mask"),
}


def export(module: nn.Module, examples: Mapping[str, Tensor], out: Path, **options: Any) -> Any:
    axes = {name: {0: "batch", 1: "memory"} if "memory" in name else ROW_AXES for name in examples}
    return export_module(module, examples, axes, out=out, name="module", **options)


@pytest.mark.parametrize(("module", "examples", "says"), REFUSED.values(), ids=REFUSED)
def test_says_what_it_does_and_what_to_change(
    module: nn.Module,
    examples: Mapping[str, Tensor],
    says: str,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(ExportError, match=says) as refusal:
        export(module, examples, tmp_path)
    message, _, details = str(refusal.value).partition("\n  details: ")
    assert len(message) < 500
    assert "\n" not in message
    assert "wider tolerance" not in message
    if details:
        assert Path(details).read_text()
        Path(details).unlink()
    captured = capfd.readouterr()
    assert captured.out + captured.err == ""
    assert not list(tmp_path.iterdir())


class Text(nn.Module):
    def forward(self, text: Tensor) -> Tensor:
        return text * 2


def test_an_input_with_a_reserved_name_can_be_renamed(tmp_path: Path) -> None:
    examples, axes = {"text": ROWS["x"]}, {"text": ROW_AXES}
    with pytest.raises(ValueError, match=r"text has a meaning of its own .* inputs={'text': 'my_text'}"):
        export_module(Text(), examples, axes, out=tmp_path, name="module")
    steps = list[str]()
    for _ in range(2):
        _, manifest = export_module(
            Text(),
            examples,
            axes,
            out=tmp_path,
            name="module",
            inputs={"text": "captions"},
            progress=steps.append,
        )
    assert [spec.name for spec in manifest.graphs[GraphKind.PLAIN].inputs] == ["captions"]
    assert steps[-1] == UNCHANGED
    assert steps.count(UNCHANGED) == 1


def test_a_mask_that_the_caller_declines_is_an_input(tmp_path: Path) -> None:
    renamed = {"masks": {"attention_mask": None}, "inputs": {"attention_mask": "shown"}}
    _, manifest = export(ReadsPadding(), MASK, tmp_path, **renamed)
    assert {kind: [spec.name for spec in graph.inputs] for kind, graph in manifest.graphs.items()} == {
        GraphKind.PLAIN: ["x", "shown"]
    }


class Pairs(nn.Module):
    """Attends to itself with a mask of query and key rows, as scaled_dot_product_attention reads it."""

    def __init__(self, *, inverted: bool = False, layers: int = 1) -> None:
        super().__init__()
        self.inverted, self.layers = inverted, layers

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        for _ in range(self.layers):
            allowed = ~mask if self.inverted else mask
            x = (x + nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=allowed)) / 2
        return x


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("inverted", [False, True])
@pytest.mark.parametrize("stated", ["True hides", "True attends"])
def test_a_mask_of_pairs_with_the_opposite_meaning_is_refused(
    inverted: bool, layers: int, stated: str, tmp_path: Path
) -> None:
    right = "True hides" if inverted else "True attends"
    examples = ROWS | {"mask": torch.ones(2, 3, 3, dtype=torch.bool)}
    axes = {"x": ROW_AXES, "mask": ROW_AXES | {2: "sequence"}}
    module = Pairs(inverted=inverted, layers=layers)

    def run() -> object:
        return export_module(module, examples, axes, out=tmp_path, name="pairs", masks={"mask": stated})

    if stated == right:
        assert run()
        return
    with pytest.raises(ExportError, match=f"depends on rows that mask hides; .*'{right}'}}: state that"):
        run()


class Masked(nn.Module):
    """Takes masks of two kinds."""

    def forward(self, x: Tensor, attn_mask: Any = None, attention_mask: Any = None) -> Tensor:
        return x if attn_mask is attention_mask else x * 2


@pytest.mark.parametrize(
    ("examples", "masks", "says"),
    [
        (
            ROWS | {"attn_mask": torch.zeros(2, 3, 3, dtype=torch.bool)},
            {},
            "attn_mask.* is a mask; state what",
        ),
        (MASK, {"attention_mask": "hides"}, "must be None or one of 'True hides', 'True attends', 'added'"),
        (ROWS, {"mask": "True hides"}, r"masks\['mask'\]: not an input; the inputs are x"),
    ],
    ids=["not stated", "unknown", "no input"],
)
def test_what_is_stated_about_masks_is_checked(
    examples: Mapping[str, Tensor], masks: Mapping[str, str], says: str, tmp_path: Path
) -> None:
    axes = {name: ROW_AXES | ({2: "sequence"} if name == "attn_mask" else {}) for name in examples}
    with pytest.raises(ValueError, match=says):
        export_module(Masked(), examples, axes, out=tmp_path, name="module", masks=masks)


AXES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "none of a mask": (
        HIDES,
        {"x": ROW_AXES},
        r"dynamic_axes has no entry for 'key_padding_mask'; name its axes, such as "
        r"{'key_padding_mask': {0: 'batch', 1: 'keys'}}$",
    ),
    "none of booleans": (
        ROWS | {"shown": torch.ones(2, 3, dtype=torch.bool)},
        {"x": ROW_AXES},
        "no entry for 'shown'; .*masks={'shown': 'True hides'} or {'shown': 'True attends'}$",
    ),
    "batch second": (ROWS, {"x": {0: "sequence", 1: "batch"}}, "with batch_first=True, or transpose .*"),
    "no mapping": (ROWS, {"x": [0, 1]}, r"\['x'\]=\[0, 1\]: must be a mapping such as {0: 'batch', 1"),
    "no tensor": (
        ROWS | {"need_weights": False},
        {"x": ROW_AXES},
        r"example_inputs\['need_weights'\] is bool, not a tensor: wrap the module to fix it",
    ),
}


class Takes(nn.Module):
    def forward(
        self, x: Tensor, key_padding_mask: Any = None, shown: Any = None, need_weights: Any = None
    ) -> Tensor:
        del key_padding_mask, shown, need_weights
        return x


@pytest.mark.parametrize(("examples", "axes", "says"), AXES.values(), ids=AXES)
def test_what_examples_and_axes_lack_is_told(
    examples: dict[str, Any], axes: dict[str, Any], says: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=says):
        export_module(Takes(), examples, axes, out=tmp_path, name="module")


class TwoOutputs(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x[..., 0]


def test_more_outputs_than_names_are_told_with_what_to_write(tmp_path: Path) -> None:
    says = (
        r"returns 2 outputs, of shapes \[2, 3, 8\], \[2, 3\]; pass output_names=\['context_vectors', "
        r"'attention_weights'\], or wrap the module to return the first$"
    )
    with pytest.raises(ValueError, match=says):
        export(TwoOutputs(), ROWS, tmp_path)

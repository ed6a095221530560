"""What the commands print: changes with how models and results read on a terminal.

Notation: T rows of a sequence, Tq query rows, Tk key rows, d elements of a row.
"""

from collections.abc import Sequence
from typing import TypeAlias

from attention_client._models import CostInfo, ModelInfo, ParityInfo, TensorInfo
from attention_client._values import FloatArray

_Row: TypeAlias = Sequence[str]
_SHOWN_ELEMENTS = 6
_EXAMPLE_LENGTH = 128


def table(rows: Sequence[_Row], *, numbers: bool = False) -> str:
    """Aligns the columns: to the left, or all but the first to the right where they hold numbers."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    aligns = ["<", *(">" if numbers else "<" for _ in widths[1:])]
    lines = (
        "  ".join(
            f"{cell:{align}{width}}" for cell, align, width in zip(row, aligns, widths, strict=True)
        ).rstrip()
        for row in rows
    )
    return "".join(f"{line}\n" for line in lines)


def word_labels(text: str, count: int) -> list[str]:
    """The words of a text without commas, where they are as many as its tokens, or else numbers."""
    words = text.replace(",", "").split()
    return words if len(words) == count else [str(index) for index in range(count)]


def models_table(models: Sequence[ModelInfo]) -> str:
    """One row per model."""
    return table([("NAME", "VERSION", "STATE", "INPUTS", "PARITY"), *(_model_row(model) for model in models)])


def vectors_table(labels: Sequence[str], vectors: FloatArray) -> str:
    """The first elements of each row of (T, d)."""
    more = ("...",) if vectors.shape[1] > _SHOWN_ELEMENTS else ()
    numbers = ([f"{number: .4f}" for number in row[:_SHOWN_ELEMENTS]] for row in vectors)
    return table([("  " + label, *row, *more) for label, row in zip(labels, numbers, strict=True)])


def weights_table(labels: Sequence[str], weights: FloatArray) -> str:
    """The weights of one head, (Tq, Tk): a row for each query, a column for each key."""
    numbers = ([f"{number:.2f}" for number in row] for row in weights)
    body = [("  " + label, *row) for label, row in zip(labels, numbers, strict=True)]
    return table([("", *labels), *body], numbers=True)


def description(model: ModelInfo) -> str:
    """Everything that the server says of a model, one thing to a line."""
    lines = [
        ("name", model.name),
        ("version", model.version),
        ("state", _state(model)),
        ("description", model.description or "-"),
        *_listed("inputs", model.inputs, "may be left out"),
        *_listed("outputs", model.outputs, "where asked for"),
        ("text", "accepted" if model.accepts_text else "not accepted"),
        ("heads", str(model.num_heads)),
        ("causal", "yes" if model.causal else "no"),
        ("parameters", f"{model.parameters:,}"),
        *_operations(model.cost),
        ("parity", _full_parity(model.parity)),
        ("provider", model.provider or "-"),
    ]
    return table(lines)


def _model_row(model: ModelInfo) -> _Row:
    inputs = ", ".join(_tensor(tensor, "?") for tensor in model.inputs) or "-"
    return model.name, model.version, _state(model), inputs, _brief_parity(model.parity)


def _state(model: ModelInfo) -> str:
    return f"{model.state}: {model.state_reason}" if model.state_reason else model.state


def _tensor(tensor: TensorInfo, mark: str = "") -> str:
    axes = ", ".join(str(axis) for axis in tensor.axes)
    return f"{tensor.name}{mark if tensor.optional else ''} {tensor.data_type} ({axes})"


def _listed(label: str, tensors: Sequence[TensorInfo], when_optional: str) -> list[_Row]:
    """A line for each tensor; the label stands before the first."""
    texts = [
        f"{_tensor(tensor)}, {when_optional}" if tensor.optional else _tensor(tensor) for tensor in tensors
    ]
    return [(label if index == 0 else "", text) for index, text in enumerate(texts or ["-"])]


def _brief_parity(parity: ParityInfo | None) -> str:
    if parity is None:
        return "-"
    limits = f"atol {parity.absolute_tolerance:g}, rtol {parity.relative_tolerance:g}"
    return f"{parity.measured_max_abs_error:.1e} ({limits})"


def _full_parity(parity: ParityInfo | None) -> str:
    if parity is None:
        return "-"
    limit = f"{parity.absolute_tolerance:.2g} + {parity.relative_tolerance:.2g} x |eager|"
    return f"|served - eager| <= {limit}; at most {parity.measured_max_abs_error:.2g} measured"


def _operations(cost: CostInfo | None) -> list[_Row]:
    """Floating-point operations, and what they come to for one sequence."""
    if cost is None:
        return [("operations", "-")]
    rows = _EXAMPLE_LENGTH * (cost.flops_per_query + cost.flops_per_key)
    pairs = _EXAMPLE_LENGTH**2 * cost.flops_per_pair
    return [
        ("operations", f"{cost.flops_per_query:,} for each query row"),
        ("", f"{cost.flops_per_key:,} for each key row"),
        ("", f"{cost.flops_per_pair:,} for each pair of a query row and a key row"),
        ("", f"{rows + pairs:,} for {_EXAMPLE_LENGTH} tokens: {rows:,} for rows, {pairs:,} for pairs"),
    ]

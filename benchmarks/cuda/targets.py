"""The targets on a GPU: bound, measured value and verdict."""

from collections.abc import Iterable, Iterator

from benchmarks.cuda.records import Record
from benchmarks.cuda.systems import ONNX_DEVICE, ONNX_HOST, TORCH_DEVICE
from benchmarks.cuda.tables import NOTHING, number

# Sequences of a request, and rows of a sequence, of the target through the server.
LARGE_REQUEST = (256, 128)
Row = tuple[str, str, str, str]
Findings = dict[str, list[Record]]


def targets(found: Findings) -> list[Row]:
    """One row for each target."""
    return [_parity(found["proof"]), *_service(found), _beside_pytorch(found)]


def _parity(proof: list[Record]) -> Row:
    own = [one for one in proof if one["precision"] == "fp32"]
    what, bound = "fp32 on the device against eager PyTorch on the CPU", "1e-5 + 1.3e-6 x abs(value)"
    if not own:
        return what, bound, NOTHING, "not measured"
    missed = sum(not one["holds"] for one in own)
    error = f"largest error {max(one.get('error', 0.0) for one in own):.2g}"
    return what, bound, f"{error}, {missed} of {len(own)} graphs missed", "missed" if missed else "met"


def _service(found: Findings) -> Iterator[Row]:
    for precision in ("fp32", "fp16"):
        what = f"through the server / in process from the host, 256 x 128 x 768, {precision}"
        batch, length = LARGE_REQUEST
        served = [
            one["rate"]
            for one in found["service"]
            if "rate" in one
            and (one["precision"], one["per_request"], one["length"]) == (precision, batch, length)
        ]
        alone = _rate(found["onnx"], precision, batch, length, ONNX_HOST)
        yield _ratio(what, 0.8, max(served) / alone if served and alone else None)


def _beside_pytorch(found: Findings) -> Row:
    what = "ONNX Runtime / eager PyTorch, both on the device, fp16, median of all cells"
    ratios = []
    for one in found["torch"]:
        if one.get("system") == TORCH_DEVICE and one["precision"] == "fp16":
            own = _rate(found["onnx"], "fp16", one["batch"], one["length"], ONNX_DEVICE)
            ratios += [own * one["median"] / one["batch"]] if own else []
    return _ratio(what, 1.0, sorted(ratios)[len(ratios) // 2] if ratios else None)


def _rate(records: Iterable[Record], precision: str, batch: int, length: int, system: str) -> float | None:
    """Sequences per second of a cell; None if it was not measured."""
    for one in records:
        cell = (one.get("precision"), one.get("batch"), one.get("length"), one.get("system"))
        if cell == (precision, batch, length, system):
            return float(batch / one["median"])
    return None


def _ratio(what: str, bound: float, value: float | None) -> Row:
    verdict = "not measured" if value is None else "met" if value >= bound else "missed"
    return what, f"at least {bound:g}", number(value), verdict

"""Replays the golden vectors of an artifact on a server of the Open Inference Protocol."""

import json
from pathlib import Path
from typing import Any, Final

import grpc
import numpy as np

from attention_client import AttentionClient, AttentionClientError
from attention_client._generated.inference import open_inference_pb2 as pb
from attention_client._generated.inference.open_inference_pb2_grpc import GRPCInferenceServiceStub
from attention_client._values import Array
from attention_client.errors import from_rpc_error

DATA_TYPES: Final = {"FP32": np.float32, "INT64": np.int64, "BOOL": np.bool_}
NAMES: Final = {np.dtype(kind): name for name, kind in DATA_TYPES.items()}
RATIO: Final = "ratio to the tolerance"
# Inputs and outputs by their names.
Case = tuple[dict[str, Array], dict[str, Array]]


def replay(client: AttentionClient, folder: Path, model: str, timeout: float) -> dict[str, Any]:
    """The report: of each case of the plain graph, its largest error, and the ratio of it to the tolerance.

    Raises:
        AttentionClientError: The server cannot be reached, or refuses a case; or there is none.
    """
    manifest = json.loads((folder / "manifest.json").read_text())
    report: dict[str, Any] = {"model": model or manifest["name"], "tolerance": manifest["tolerance"]}
    report["cases"] = cases = {}
    infer = GRPCInferenceServiceStub(client._channels[-1].channel).ModelInfer
    for index, (inputs, outputs) in _read_cases(folder, manifest).items():
        request = pb.ModelInferRequest(model_name=report["model"])
        for name, array in inputs.items():
            request.inputs.add(name=name, datatype=NAMES[array.dtype], shape=array.shape)
            request.raw_input_contents.append(array.tobytes())
        for name in outputs:
            request.outputs.add(name=name)
        try:
            response = infer(request, timeout=timeout, metadata=client._metadata)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error
        cases[index] = _compare(response, outputs, manifest["tolerance"])
    ratios = [case[RATIO] for case in cases.values()]
    if not ratios:
        raise AttentionClientError(f"{folder} has no golden vectors that begin with arrays")
    equal = sum(ratio <= 1 for ratio in ratios)
    verdict = f"equal: {equal} of {len(ratios)} cases; largest error {max(ratios):.2g} of the tolerance"
    status = int(equal < len(ratios))
    return {**report, "status": status, "verdict": f"not {verdict}" if status else verdict}


def _read_cases(folder: Path, manifest: dict[str, Any]) -> dict[str, Case]:
    """Inputs and outputs of the cases of the plain graph that begin with arrays, not with a text."""
    if (path := folder / "golden.npz").is_file():  # of a deployment, which has this graph only
        arrays = {f"plain/{name}": array for name, array in np.load(path).items()}
    else:
        from safetensors.numpy import load_file  # noqa: PLC0415 - an extra

        arrays = load_file(folder / manifest["golden"])
    cases: dict[str, Case] = {}
    for key, array in sorted(arrays.items()):
        graph, index, side, name = key.split("/")
        if graph == "plain":
            cases.setdefault(index, ({}, {}))[side == "outputs"][name] = array
    return {index: case for index, case in cases.items() if not {"text", "query_text"} & case[0].keys()}


def _compare(response: pb.ModelInferResponse, outputs: dict[str, Array], tolerance: Any) -> dict[str, float]:
    """The largest error of the outputs, infinite for one that is missing or has another shape."""
    rows: dict[str, Array] = {}
    for tensor, content in zip(response.outputs, response.raw_output_contents, strict=False):
        rows[tensor.name] = np.frombuffer(content, DATA_TYPES[tensor.datatype]).reshape(tensor.shape)
    error = ratio = 0.0
    for name, expected in outputs.items():
        if name not in rows or rows[name].shape != expected.shape:
            return {"largest error": np.inf, RATIO: np.inf}
        empty = np.isnan(rows[name]) & np.isnan(expected)
        differences = np.where(empty, 0, np.abs(rows[name].astype(np.float64) - expected))
        limits = tolerance["atol"] + tolerance["rtol"] * np.abs(np.where(empty, 0, expected))
        error = max(error, float(np.nan_to_num(differences, nan=np.inf).max()))
        ratio = max(ratio, float(np.nan_to_num(differences / limits, nan=np.inf).max()))
    return {"largest error": error, RATIO: ratio}

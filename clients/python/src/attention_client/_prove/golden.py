"""Replays the golden vectors of an artifact on a server of the Open Inference Protocol."""

import json
from pathlib import Path
from typing import Any, Final

import grpc
import numpy as np

from attention_client import AttentionClient, AttentionClientError, InvalidArgumentError
from attention_client._generated.inference import open_inference_pb2 as pb
from attention_client._generated.inference.open_inference_pb2_grpc import GRPCInferenceServiceStub
from attention_client._values import Array
from attention_client.errors import from_rpc_error

DATA_TYPES: Final = {"FP32": np.float32, "INT64": np.int64, "BOOL": np.bool_}
NAMES: Final = {np.dtype(kind): name for name, kind in DATA_TYPES.items()}


def replay(client: AttentionClient, folder: Path, model: str, timeout: float) -> dict[str, Any]:
    """The report: of each case of the plain graph, its largest error, and the ratio of it to the tolerance.

    Raises:
        AttentionClientError: The server cannot be reached, or refuses every case; or there is none.
    """
    manifest = json.loads((folder / "manifest.json").read_text())
    infer = GRPCInferenceServiceStub(client._channels[-1].channel).ModelInfer
    results: dict[str, Any] = {}
    for index, (inputs, outputs) in _read_cases(folder, manifest).items():
        request = pb.ModelInferRequest(model_name=model or manifest["name"])
        for name, array in inputs.items():
            request.inputs.add(name=name, datatype=NAMES[array.dtype], shape=array.shape)
            request.raw_input_contents.append(array.tobytes())
        for name in outputs:
            request.outputs.add(name=name)
        try:
            response = infer(request, timeout=timeout, metadata=client._metadata)
        except grpc.RpcError as error:
            if not isinstance(refusal := from_rpc_error(error), InvalidArgumentError):
                raise refusal from error
            results[index] = {"refused": str(refusal)}
            continue
        results[index] = _compare(response, outputs, manifest["tolerance"])
    ratios = [case["ratio to the tolerance"] for case in results.values() if "refused" not in case]
    if not ratios:
        raise AttentionClientError(f"no golden case of arrays was answered: {results}")
    equal, refused = sum(ratio <= 1 for ratio in ratios), len(results) - len(ratios)
    verdict = f"equal: {equal} of {len(ratios)} cases; largest error {max(ratios):.2g} of the tolerance"
    verdict = f"{'not ' if equal < len(ratios) else ''}{verdict}{f'; {refused} refused' if refused else ''}"
    facts = {"model": model or manifest["name"], "tolerance": manifest["tolerance"]}
    return {**facts, "cases": results, "status": int(equal < len(ratios)), "verdict": verdict}


def _read_cases(
    folder: Path, manifest: dict[str, Any]
) -> dict[str, tuple[dict[str, Array], dict[str, Array]]]:
    """Inputs and outputs of the cases of the plain graph that begin with arrays, not with a text."""
    if (path := folder / "golden.npz").is_file():  # of a deployment, which has this graph only
        arrays = {f"plain/{name}": array for name, array in np.load(path).items()}
    else:
        from safetensors.numpy import load_file  # noqa: PLC0415 - an extra

        arrays = load_file(folder / manifest["golden"])
    cases: dict[str, tuple[dict[str, Array], dict[str, Array]]] = {}
    for key, array in sorted(arrays.items()):
        graph, index, side, name = key.split("/")
        if graph == "plain":
            cases.setdefault(index, ({}, {}))[side == "outputs"][name] = array
    return {index: case for index, case in cases.items() if "text" not in case[0]}


def _compare(
    response: pb.ModelInferResponse, outputs: dict[str, Array], tolerance: dict[str, Any]
) -> dict[str, Any]:
    pairs = zip(response.outputs, response.raw_output_contents, strict=False)
    rows: dict[str, Array] = {
        o.name: np.frombuffer(content, DATA_TYPES[o.datatype]).reshape(o.shape) for o, content in pairs
    }
    error = ratio = 0.0
    for name, expected in outputs.items():
        if name not in rows or rows[name].shape != expected.shape:
            return {
                "largest error": f"{name} is missing or of another shape",
                "ratio to the tolerance": np.inf,
            }
        difference = np.abs(rows[name].astype(np.float64) - expected)
        difference = np.where(
            np.isnan(rows[name]) & np.isnan(expected), 0, np.nan_to_num(difference, nan=np.inf)
        )
        limits = tolerance["atol"] + tolerance["rtol"] * np.abs(np.nan_to_num(expected))
        error, ratio = max(error, float(difference.max())), max(ratio, float((difference / limits).max()))
    return {"largest error": error, "ratio to the tolerance": ratio}

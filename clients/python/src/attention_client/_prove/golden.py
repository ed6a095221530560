"""Replays the golden vectors of an artifact against a server of the Open Inference Protocol."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import grpc
import numpy as np

from attention_client import AttentionClient
from attention_client._generated.inference import open_inference_pb2 as pb
from attention_client._generated.inference import open_inference_pb2_grpc as pb_grpc
from attention_client._prove.servers import NotJudgedError
from attention_client._values import Array

DATA_TYPES: Final = {"FP32": np.float32, "INT64": np.int64, "BOOL": np.bool_, "FP16": np.float16}
NAMES: Final = {np.dtype(kind): name for name, kind in DATA_TYPES.items()}
PLAIN: Final = "plain"


def read_cases(folder: Path, manifest: Mapping[str, Any]) -> dict[str, dict[str, dict[str, Array]]]:
    """The inputs and outputs of each golden case of the plain graph that does not begin with a text."""
    path = folder / "golden.npz"
    if path.is_file():  # of a deployment, without the names of graphs
        arrays = {f"{PLAIN}/{name}": array for name, array in np.load(path).items()}
    else:
        from safetensors.numpy import load_file  # noqa: PLC0415 - an extra

        arrays = load_file(folder / manifest["golden"])
    cases: dict[str, dict[str, dict[str, Array]]] = {}
    for key, array in arrays.items():
        graph, index, side, name = key.split("/")
        if graph == PLAIN:
            cases.setdefault(index, {"inputs": {}, "outputs": {}})[side][name] = array
    return {index: case for index, case in cases.items() if "text" not in case["inputs"]}


def replay(client: AttentionClient, folder: Path, model: str, timeout: float) -> dict[str, Any]:
    """The report: of each case, its largest error, and the largest ratio of an error to its tolerance.

    Raises:
        NotJudgedError: The server cannot be reached, or refuses every case; or the artifact has none.
    """
    manifest = json.loads((folder / "manifest.json").read_text())
    name, tolerance = model or manifest["name"], manifest["tolerance"]
    stub, results = pb_grpc.GRPCInferenceServiceStub(client._channels[-1].channel), {}
    for index, case in sorted(read_cases(folder, manifest).items()):
        request = pb.ModelInferRequest(model_name=name)
        for key, array in case["inputs"].items():
            request.inputs.add(name=key, datatype=NAMES[array.dtype], shape=array.shape)
            request.raw_input_contents.append(array.tobytes())
        for key in case["outputs"]:
            request.outputs.add(name=key)
        try:
            response = stub.ModelInfer(request, timeout=timeout, metadata=client._metadata)
        except grpc.RpcError as error:
            code = error.code()
            if code is not grpc.StatusCode.INVALID_ARGUMENT:
                raise NotJudgedError(f"{code.name}: {error.details()}") from error
            results[index] = {"refused": error.details()}
            continue
        results[index] = _compare(response, case["outputs"], tolerance)
    judged = [case for case in results.values() if "refused" not in case]
    if not judged:
        message = next(
            (case["refused"] for case in results.values()), "the artifact has no golden vectors of arrays"
        )
        raise NotJudgedError(message)
    worst = max(judged, key=lambda case: case["ratio"])
    wrong, refused = sum(case["ratio"] > 1 for case in judged), len(results) - len(judged)
    ending = f"largest error {worst['largest error']:.1e}, {worst['ratio']:.2g} of the tolerance"
    verdict = f"{'not equal' if wrong else 'equal'}: {len(judged) - wrong} of {len(judged)} cases"
    verdict += f"; {refused} refused; {ending}" if refused else f"; {ending}"
    status = int(wrong > 0)
    return {"model": name, "tolerance": tolerance, "cases": results, "status": status, "verdict": verdict}


def _compare(
    response: pb.ModelInferResponse, outputs: Mapping[str, Array], tolerance: Mapping[str, Any]
) -> dict[str, Any]:
    contents = response.raw_output_contents or [b""] * len(response.outputs)
    error = ratio = 0.0
    rows = {}
    for output, content in zip(response.outputs, contents, strict=True):
        flat: Array = (
            np.frombuffer(content, DATA_TYPES[output.datatype])
            if content
            else np.array(output.contents.fp32_contents)
        )
        rows[output.name] = flat.reshape(output.shape).astype(np.float64)
    for name, expected in outputs.items():
        if name not in rows or rows[name].shape != expected.shape:
            return {"largest error": np.inf, "ratio": np.inf}
        difference = np.abs(rows[name] - expected)
        difference[np.isnan(rows[name]) & np.isnan(expected)] = 0
        error = max(error, float(difference.max(initial=0)))
        limits = tolerance["atol"] + tolerance["rtol"] * np.abs(expected)
        ratio = max(ratio, float((difference / limits).max(initial=0)))
    return {"largest error": error, "ratio": ratio}

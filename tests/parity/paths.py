"""The paths from named tensors to outputs: eager, exported, attention.v1, Open Inference Protocol.

A case holds the tensors of one rectangular batch by name: query, key, value, token_ids, positions and
attention_mask, as the module's `forward` takes them.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import onnxruntime
import torch
from attention_client import AttentionClient

from attention_serving.artifact.manifest import GraphKind, Manifest
from attention_serving.model.attention import MultiHeadAttention
from attention_serving.model.text import TextAttention
from scripts.local_server import ServerProcess
from tests.support import open_inference
from tests.support.eager import Array

Case = dict[str, Array]
Outputs = dict[str, Array]
Routes = dict[str, Callable[[str, Case], Outputs]]
Module = MultiHeadAttention | TextAttention
NAMES = ["context_vectors", "attention_weights"]
SERVED = ("exported", "attention.v1", "open inference")


def eager(module: Module, case: Case) -> Outputs:
    tensors = {key: torch.from_numpy(value) for key, value in case.items()}
    with torch.inference_mode():
        context, _ = module(**tensors)
        _, weights = module(**tensors, return_weights=True)
    return {"context_vectors": context.numpy(), "attention_weights": weights.numpy()}


def exported(repository: Path, name: str, case: Case) -> Outputs:
    """Returns the outputs of the ONNX files alone, in a bare session."""
    folder = repository / name / "1"
    graphs = Manifest.load(folder).graphs
    query = next(iter(case.values()))
    shape = (len(query), 1, query.shape[1], case.get("key", query).shape[1])

    def run(kind: GraphKind, inputs: Case) -> list[Array]:
        path = str(folder / graphs[kind].file)
        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        outputs: list[Array] = session.run(None, inputs)
        return outputs

    kind = GraphKind.MASK if "attention_mask" in case else GraphKind.PLAIN
    every_key = {"attention_mask": np.ones(shape, bool)}
    return {
        "context_vectors": run(kind, case)[0],
        "attention_weights": run(GraphKind.WEIGHTS, every_key | case)[1],
    }


def typed(client: AttentionClient, name: str, case: Case) -> Outputs:
    """Returns the outputs over attention.v1, through its client."""
    mask, positions = case.get("attention_mask"), case.get("positions")

    def ask(*, return_weights: bool) -> Outputs:
        if "token_ids" in case:
            ids = case["token_ids"]
            answer = client.attend_tokens(name, ids, mask=mask, return_weights=return_weights)
        else:
            inputs = [case[key] for key in ("query", "key", "value") if key in case]
            answer = client.attend(
                name, *inputs, mask=mask, positions=positions, return_weights=return_weights
            )
        weights = {} if answer.attention_weights is None else {"attention_weights": answer.attention_weights}
        return {"context_vectors": answer.context_vectors, **weights}

    return ask(return_weights=True) | ask(return_weights=False)


def open_protocol(server: ServerProcess, name: str, case: Case) -> Outputs:
    """Returns the outputs over the Open Inference Protocol."""
    with_weights = open_inference.infer(server.target, name, case, NAMES)
    return with_weights | open_inference.infer(server.target, name, case, NAMES[:1])


def routes(repository: Path, server: ServerProcess, client: AttentionClient) -> Routes:
    """A function for each of SERVED: from the name of a model and a case to its outputs."""
    return {
        "exported": partial(exported, repository),
        "attention.v1": partial(typed, client),
        "open inference": partial(open_protocol, server),
    }

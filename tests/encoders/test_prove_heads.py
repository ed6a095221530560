"""`attention-client prove` names what wrong servers of sparse embeddings and token vectors do otherwise.

Behind each of them is the real library.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import grpc
import numpy as np
import pytest
from sentence_transformers import MultiVectorEncoder, SparseEncoder

from attention_serving.protos.attention.v1 import attention_pb2 as pb
from attention_serving.protos.attention.v1 import attention_pb2_grpc
from tests.encoders.heads import COLBERT, INFERENCE_FREE, SPLADE, save_folder
from tests.encoders.test_prove import prove, put

thorough = pytest.mark.thorough
Change = Callable[[Any], object]
METHODS = {pb.INPUT_KIND_QUERY: "encode_query", pb.INPUT_KIND_DOCUMENT: "encode_document"}


class Wrong(attention_pb2_grpc.AttentionServiceServicer):
    """Answers streams with the outputs of a changed model of the library."""

    def __init__(self, folder: Path, change: Change, options: dict[str, Any]) -> None:
        self.after, self.method = options.pop("after", lambda rows: rows), options.pop("method", "")
        self.options, self.is_sparse = options, folder.name != COLBERT
        self.model: Any = (SparseEncoder if self.is_sparse else MultiVectorEncoder)(str(folder), device="cpu")
        change(self.model)

    def AttendStream(self, requests: Any, context: Any) -> Iterator[pb.AttendStreamResponse]:  # noqa: N802, ARG002
        for request in requests:
            text, response = request.request.text, pb.AttendResponse(model_name="m", model_version="1")
            encode = getattr(self.model, self.method or METHODS.get(text.input_kind, "encode"))
            options = {**({"prompt_name": text.prompt} if text.HasField("prompt") else {}), **self.options}
            rows = [row.float() for row in encode([*text.texts], **options)]
            if self.is_sparse:
                for row in self.after(np.stack([row.to_dense().numpy() for row in rows])):
                    (ids,) = row.nonzero()
                    response.sparse_embeddings.lengths.append(len(ids))
                    response.sparse_embeddings.indices.extend(ids)
                    response.sparse_embeddings.values.extend(row[ids])
            else:
                vectors = response.token_vectors
                vectors.lengths.extend(map(len, rows))
                vectors.data_type, vectors.width = pb.DATA_TYPE_FP32, rows[0].shape[-1]
                vectors.data = b"".join(row.numpy().tobytes() for row in rows)
            yield pb.AttendStreamResponse(id=request.id, response=response)


@cache
def folder_of(name: str) -> Path:
    """A folder of the reference library, which is made once."""
    return save_folder(name, Path(mkdtemp()) / name)


def splade(name: str, value: str) -> Change:
    return put(lambda model: model[1], name, value)


def score_padding(model: Any) -> None:
    """Padding has vectors, too."""
    forward = model[2].forward

    def run(features: Any, **options: Any) -> Any:
        mask = features["attention_mask"]
        return forward({**features, "attention_mask": mask.new_ones(mask.shape)}, **options)

    model[2].forward = run


def same(_: Any) -> None:
    pass


# The folder, what a server does otherwise, and the cause.
CASES: dict[str, tuple[str, Change, dict[str, Any], str]] = {
    "sum": (SPLADE, splade("pooling_strategy", "sum"), {}, "pooling is sum rather than max"),
    "second logarithm": (
        SPLADE,
        splade("activation_function", "log1p_relu"),
        {},
        "weights are logarithms of the library's",
    ),
    "no logarithm": (SPLADE, same, {"after": np.expm1}, "weights are without the logarithm"),
    "top k": (SPLADE, same, {"max_active_dims": 20}, "only the 20 largest weights are returned"),
    "other ids": (
        SPLADE,
        same,
        {"after": lambda rows: np.roll(rows, 1, axis=1)},
        "token ids are those of another tokenizer",
    ),
    "kinds": (INFERENCE_FREE, same, {"method": "encode_document"}, "queries are computed as documents"),
    "raw": (COLBERT, lambda model: model.pop(3), {}, "token vectors are not normalised"),
    "no skip list": (
        COLBERT,
        put(lambda model: model[2], "_skiplist_ids", None),
        {},
        "the skip list is not applied",
    ),
    "no expansion": (
        COLBERT,
        put(lambda model: model[0], "query_expansion", None),
        {},
        "query expansion is missing",
    ),
    "one prompt": (COLBERT, same, {"prompt_name": "document"}, "the prompt 'document' is put before texts"),
    "no prompt": (COLBERT, same, {"prompt": ""}, "the prompt is missing"),
    "padding": (COLBERT, score_padding, {}, "padding has vectors"),
}
QUICK = ("sum", "no expansion")


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=thorough) for name in CASES]
)
def test_the_cause_of_wrong_heads(name: str) -> None:
    folder, change, options, cause = CASES[name]
    server = grpc.server(ThreadPoolExecutor(2))
    wrong = Wrong(folder_of(folder), change, dict(options))  # type: ignore[abstract]  # only streams
    attention_pb2_grpc.add_AttentionServiceServicer_to_server(wrong, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        status, report = prove(folder_of(folder), "--grpc", f"127.0.0.1:{port}", "--model", "m")
    finally:
        server.stop(None).wait()
    assert (status, report.get("causes", [""])[0]) == (1, cause), report

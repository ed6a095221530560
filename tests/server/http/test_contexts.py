"""Stored contexts: the message that a body becomes, what is wrong with others, lists and ends."""

from typing import Any

import numpy as np

from attention_serving.protos.attention.v1 import attention_pb2 as pb
from tests.server.api.messages import vectors
from tests.server.http.clients import ask, binary_body, tensor
from tests.server.http.scripted import Scripted

PATH = "/v2/models/m/versions/2/contexts"
KEY = np.arange(12, dtype=np.float32).reshape(3, 4)
MASK = {"name": "mask", "shape": [3], "datatype": "BOOL", "data": [True, False, True]}
NAMED: dict[str, Any] = {"model_name": "m", "model_version": "2"}
CONTEXT = {**NAMED, "id": "c1", "rows": 2, "bytes": 64, "expires_at": 1_800_000_000, "shared": True}


def test_rows_are_put(scripted: Scripted, port: int) -> None:
    scripted.answer("PutContext", pb.PutContextResponse(context=pb.Context(**CONTEXT)))
    parameters: dict[str, Any] = {"ttl_seconds": 60, "shared": True}
    inputs = [tensor("value", KEY[None, :, :2]), MASK, tensor("key", KEY)]
    answer = ask(port, PATH, {"parameters": parameters, "inputs": inputs})
    assert (answer.status, answer.json) == (200, CONTEXT)
    mask = pb.AttentionMask(kind=pb.AttentionMask.KIND_KEYS, bits=b"\x05")
    expected = pb.PutContextRequest(**NAMED, **parameters)
    expected.MergeFrom(pb.PutContextRequest(key=vectors(KEY), value=vectors(KEY[:, :2]), mask=mask))
    assert scripted.next().request == expected


def test_binary_rows_are_appended(scripted: Scripted, port: int) -> None:
    scripted.answer("AppendContext", pb.AppendContextResponse(context=pb.Context(**CONTEXT)))
    half = KEY.astype(np.float16)
    given = {"name": "key", "shape": [3, 4], "datatype": "FP16", "parameters": {"binary_data_size": 24}}
    document = {"parameters": {"append_to": "c0"}, "inputs": [given]}
    answer = ask(port, PATH, *binary_body(document, half.tobytes()))
    assert (answer.status, answer.json) == (200, CONTEXT)
    assert scripted.next().request == pb.AppendContextRequest(**NAMED, id="c0", key=vectors(half))


def test_contexts_are_listed_and_dropped(scripted: Scripted, port: int) -> None:
    listed: dict[str, Any] = {"contexts": [CONTEXT], "next_page_token": "7"}
    scripted.answer("ListContexts", pb.ListContextsResponse(**listed))
    page = ask(port, f"{PATH}?page_size=1&page_token=9&name=ignored")
    assert page.json == listed
    asked: dict[str, Any] = {"page_size": 1, "page_token": "9"}
    assert scripted.next().request == pb.ListContextsRequest(**NAMED, **asked)
    assert ask(port, f"{PATH}?page_size=many").status == 400
    answer = ask(port, f"{PATH}/c1", method="DELETE")
    assert (answer.status, answer.body, "content-length" in answer.headers) == (204, b"", False)
    assert scripted.next().request == pb.DropContextRequest(**NAMED, id="c1")

"""Fields that are cut out of messages or appended to them: the protobuf library agrees."""

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from protos.attention.v1 import attention_pb2 as typed
from protos.inference import open_inference_pb2 as pb
from server.rpc.attention import codec as attention_codec
from server.rpc.open_inference import codec as open_inference_codec
from server.rpc.protobuf_bytes import SMALL_BYTES, Tree, cut, field, reader

CONTENTS = pb.ModelInferRequest.RAW_INPUT_CONTENTS_FIELD_NUMBER
content = st.binary(max_size=300)


@st.composite
def infer_requests(draw: st.DrawFn) -> pb.ModelInferRequest:
    """Requests with every kind of field: numbers, strings, maps, submessages, raw contents."""
    message = pb.ModelInferRequest(model_name=draw(st.text()), id=draw(st.text()))
    for _ in range(draw(st.integers(0, 3))):
        message.inputs.add(name=draw(st.text()), shape=draw(st.lists(st.integers(-(2**62), 2**62))))
    message.parameters["timeout"].int64_param = draw(st.integers(-(2**63), 2**63 - 1))
    message.parameters["share"].double_param = draw(st.floats(allow_nan=False))
    message.raw_input_contents.extend(draw(st.lists(content, max_size=4)))
    return message


def vectors(data: bytes) -> typed.VectorSequences:
    return typed.VectorSequences(data_type=typed.DATA_TYPE_FP32, width=3, lengths=[1, 300], data=data)


@given(message=infer_requests())
def test_fields_that_are_cut_out_equal_those_that_the_library_parses(message: pb.ModelInferRequest) -> None:
    rest, blobs = cut(message.SerializeToString(), {CONTENTS: True})
    assert [bytes(blob) for _, blob in blobs] == list(message.raw_input_contents)
    assert {path for path, _ in blobs} <= {(CONTENTS,)}
    message.ClearField("raw_input_contents")
    assert pb.ModelInferRequest.FromString(rest) == message


@given(query=content, key=content, text=st.text())
def test_fields_are_cut_out_of_submessages(query: bytes, key: bytes, text: str) -> None:
    request = typed.AttendRequest(model_name=text, query=vectors(query), key=vectors(key), positions=[1, 2])
    streamed = typed.AttendStreamRequest(id=text, request=request)
    tree: Tree = {typed.AttendStreamRequest.REQUEST_FIELD_NUMBER: attention_codec.TENSORS}
    rest, blobs = cut(streamed.SerializeToString(), tree)
    # An empty field is not serialized.
    assert [bytes(blob) for _, blob in blobs] == [data for data in (query, key) if data]
    for part in (streamed.request.query, streamed.request.key):
        part.ClearField("data")
    assert typed.AttendStreamRequest.FromString(rest) == streamed


@given(data=st.binary(max_size=400))
def test_arbitrary_bytes_are_refused_or_kept(data: bytes) -> None:
    try:
        rest, blobs = cut(data, {CONTENTS: True})
    except DecodeError:
        return
    assert len(rest) + sum(len(blob) for _, blob in blobs) <= len(data)


@pytest.mark.parametrize(
    "data",
    [b"\x3a", b"\x3a\x05ab", b"\x3b", b"\x0d\x00", b"\xff" * 11, b"\x3a" + b"\xff" * 9 + b"\x01"],
    ids=["no length", "short content", "group", "short number", "endless number", "huge length"],
)
def test_malformed_messages_are_refused_as_the_library_refuses_them(data: bytes) -> None:
    with pytest.raises(DecodeError):
        pb.ModelInferRequest.FromString(data)
    with pytest.raises(DecodeError):
        cut(data, {CONTENTS: True})


@given(contents=st.lists(content, max_size=3))
def test_a_field_that_is_appended_is_parsed_by_the_library(contents: list[bytes]) -> None:
    head = pb.ModelInferResponse(model_name="m", raw_output_contents=[b"first"])
    message = head.SerializeToString() + b"".join(field(open_inference_codec.RAW_OUTPUT_CONTENTS, contents))
    found = pb.ModelInferResponse.FromString(message)
    assert (found.model_name, list(found.raw_output_contents)) == ("m", [b"first", b"".join(contents)])


@given(data=content)
def test_a_field_of_a_submessage_merges_with_it(data: bytes) -> None:
    head = typed.AttendStreamResponse(id="7", response=typed.AttendResponse(context_vectors=vectors(b"")))
    path = (*attention_codec.STREAMED, *attention_codec.CONTEXT_DATA)
    found = typed.AttendStreamResponse.FromString(head.SerializeToString() + b"".join(field(path, [data])))
    assert found.id == "7"
    assert found.response.context_vectors == vectors(data)


@pytest.mark.parametrize("size", [10, SMALL_BYTES], ids=["parsed whole", "cut"])
def test_small_messages_are_parsed_whole(size: int) -> None:
    message = pb.ModelInferRequest(model_name="m", raw_input_contents=[bytes(size)])
    found = reader(pb.ModelInferRequest.FromString, {CONTENTS: True})(message.SerializeToString())
    contents = [bytes(blob) for _, blob in found.blobs] or list(found.message.raw_input_contents)
    assert contents == [bytes(size)]
    assert bool(found.blobs) == (size == SMALL_BYTES)

"""The drain of a process that serves a repository."""

from pathlib import Path

import grpc
import numpy as np
import pytest

from attention_serving.protos.attention.v1 import attention_pb2 as pb
from attention_serving.protos.attention.v1.attention_pb2_grpc import AttentionServiceStub
from scripts.local_server import serving
from tests.server.seams import wait_until
from tests.support.artifacts import link_tree
from tests.support.eager import assert_parity, attend
from tests.support.prometheus import page
from tests.support.systems import build

MODEL = "multi-head-64x4"
LONG = np.random.default_rng(0).standard_normal((2000, 64), dtype=np.float32)


def test_a_drain_answers_every_accepted_call(repository: Path, tmp_path: Path) -> None:
    link_tree(repository / MODEL, tmp_path / "models" / MODEL)
    eager, _ = attend(build(MODEL), LONG)
    query = pb.VectorSequences(
        data_type=pb.DATA_TYPE_FP32, width=64, lengths=[len(LONG)], data=LONG.tobytes()
    )
    request = pb.AttendRequest(model_name=MODEL, query=query)
    with (
        serving(tmp_path / "models", tmp_path / "log") as server,
        grpc.insecure_channel(server.target) as channel,
    ):
        stub = AttentionServiceStub(channel)
        sent = [stub.Attend.future(request, timeout=60) for _ in range(8)]
        # On one connection calls arrive in the order in which they are made; their messages come later.
        stub.GetModel(pb.GetModelRequest(name=MODEL), timeout=60)
        # The message of every call that has arrived was received.
        wait_until(lambda: "\nattention_waiting_calls 0.0\n" in page(server.metrics_port))
        assert server.stop() == 0
        for call in sent:
            vectors = call.result().context_vectors
            assert_parity(np.frombuffer(vectors.data, np.float32).reshape(LONG.shape), eager)
        with pytest.raises(grpc.RpcError) as refused:
            stub.Attend(request, timeout=1)
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    log = (tmp_path / "log").read_text()
    assert log.index(" draining ") < log.index(" drained ") < log.index(" stopped")

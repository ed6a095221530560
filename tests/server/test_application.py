"""A server process from its start to its end: ports before models, signals, drains."""

import os
import shutil
import socket
from pathlib import Path
from queue import SimpleQueue

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from attention_serving.protos.attention.v1 import attention_pb2 as pb
from attention_serving.protos.attention.v1.attention_pb2_grpc import AttentionServiceStub
from tests.server.samples import SELF
from tests.server.watched import watched
from tests.support.prometheus import scrape, value

REQUEST = pb.AttendRequest(
    model_name=SELF,
    query=pb.VectorSequences(
        data_type=pb.DATA_TYPE_FP32, width=4, lengths=[2], data=np.ones((2, 4), np.float32).tobytes()
    ),
)
HOST = "127.0.0.1"
SERVING = health_pb2.HealthCheckResponse.SERVING

pytestmark = pytest.mark.timeout(120)


class SlowRepository:
    """A repository with a model whose manifest cannot be read before `proceed`: loading blocks until then."""

    def __init__(self, source: Path, folder: Path) -> None:
        self.folder = folder
        shutil.copytree(source / SELF, folder / SELF)
        self._pipe = folder / SELF / "1" / "manifest.json"
        self._manifest = self._pipe.read_bytes()
        self._pipe.unlink()
        os.mkfifo(self._pipe)

    def proceed(self) -> None:
        self._pipe.write_bytes(self._manifest)


class OpenStream:
    """A stream on which one request has been answered."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._requests: SimpleQueue[pb.AttendStreamRequest | None] = SimpleQueue()
        self._requests.put(pb.AttendStreamRequest(request=REQUEST))
        self._call = AttentionServiceStub(channel).AttendStream(iter(self._requests.get, None), timeout=60)
        assert next(self._call).response.context_vectors.lengths == [2]

    def wait_for_drain(self) -> None:
        """The server ends the stream, because nothing is outstanding on it."""
        with pytest.raises(grpc.RpcError) as caught:
            next(self._call)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        self._requests.put(None)


def test_ports_are_bound_and_metrics_served_while_models_load(artifacts: Path, tmp_path: Path) -> None:
    repository = SlowRepository(artifacts, tmp_path / "models")
    with watched(repository.folder, tmp_path) as server:
        port, metrics_port = server.ports("ports bound")
        server.until(" loading ")
        assert value(scrape(metrics_port), "attention_model_ready", model=SELF, version="1") == 0
        with grpc.insecure_channel(f"{HOST}:{port}") as channel:
            check = health_pb2_grpc.HealthStub(channel).Check
            health = check.future(health_pb2.HealthCheckRequest(), timeout=60)
            answer = AttentionServiceStub(channel).Attend.future(REQUEST, timeout=60)
            with socket.create_connection((HOST, port), timeout=60):  # bound, and not served yet
                assert not health.done()
            repository.proceed()
            assert health.result().status == SERVING
            assert answer.result().context_vectors.lengths == [2]
        assert server.ports() == (port, metrics_port)
        assert value(scrape(metrics_port), "attention_model_ready", model=SELF, version="1") == 1

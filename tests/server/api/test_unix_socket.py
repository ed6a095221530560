"""A server that listens on a Unix domain socket beside its port."""

import dataclasses
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import grpc
import pytest

from attention_serving.protos.attention.v1 import attention_pb2 as pb
from attention_serving.protos.attention.v1.attention_pb2_grpc import AttentionServiceStub
from attention_serving.server.engine.engine import Engine
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.models.repository import Repository
from attention_serving.server.errors import BindError
from attention_serving.server.grpc_server import RpcServer
from attention_serving.server.transport.options import MAX_PATH_BYTES, UnixSocket
from tests.server.api.messages import attend_request
from tests.server.api.stopping import OPTIONS
from tests.server.seams import PATIENCE_SECONDS, Calls

CALLS = 20


@pytest.fixture
def path() -> Iterator[Path]:
    """A path in a folder whose name is short, as that of a socket must be."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder) / "socket"


@pytest.fixture
def engine(self_model: LoadedModel) -> Iterator[Engine]:
    with closing(Engine(Repository([self_model]))) as engine:
        yield engine


class Serving:
    """A server on a port and a socket."""

    def __init__(self, path: Path, engine: Engine) -> None:
        self.server = RpcServer(
            dataclasses.replace(OPTIONS, unix_socket=path, max_concurrent_calls=CALLS), Calls()
        )
        self.targets = [f"unix:{path}", f"{OPTIONS.host}:{self.server.bind()}"]
        self.server.start(engine)

    def stop(self) -> None:
        self.server.stop(PATIENCE_SECONDS)


@pytest.fixture
def serving(path: Path, engine: Engine) -> Iterator[Serving]:
    found = Serving(path, engine)
    yield found
    found.stop()


def ask(target: str) -> pb.AttendResponse:
    with grpc.insecure_channel(target) as channel:
        found: pb.AttendResponse = AttentionServiceStub(channel).Attend(
            attend_request([3]), timeout=PATIENCE_SECONDS
        )
        return found


def test_both_addresses_answer_alike_and_their_connections_are_counted(serving: Serving) -> None:
    assert ask(serving.targets[0]) == ask(serving.targets[1])
    channels = [grpc.insecure_channel(target) for target in serving.targets]
    for channel in channels:
        grpc.channel_ready_future(channel).result(PATIENCE_SECONDS)
    assert serving.server.load().connections == len(channels)
    for channel in channels:
        channel.close()


def test_a_second_server_is_refused_and_the_first_goes_on(serving: Serving, path: Path) -> None:
    second = RpcServer(dataclasses.replace(OPTIONS, unix_socket=path, max_concurrent_calls=CALLS), Calls())
    with pytest.raises(BindError, match=f"{path}: another process listens on it"):
        second.bind()
    second.stop(0)
    assert ask(serving.targets[0]).HasField("context_vectors")


def test_a_later_server_keeps_its_socket_when_the_earlier_one_ends(
    serving: Serving, path: Path, engine: Engine
) -> None:
    path.unlink()
    later = Serving(path, engine)
    serving.stop()
    assert list(path.parent.iterdir()) == [path]
    assert ask(later.targets[0]).HasField("context_vectors")
    later.stop()
    assert list(path.parent.iterdir()) == []


def test_a_path_that_cannot_be_used_is_refused(path: Path) -> None:
    path.write_text("kept")
    folder = path.parent
    for other, says in (
        (path, "there is a file that is not a socket"),
        (path / "socket", "the folder does not exist"),
        (folder / ("s" * (MAX_PATH_BYTES - len(str(folder)))), "the path is longer than"),
    ):
        with pytest.raises(BindError, match=says):
            UnixSocket(other).prepare()
    assert path.read_text() == "kept"


def test_a_drain_answers_the_calls_of_the_socket(serving: Serving) -> None:
    with grpc.insecure_channel(serving.targets[0]) as channel:
        stub = AttentionServiceStub(channel)
        calls = [stub.Attend.future(attend_request([n]), timeout=PATIENCE_SECONDS) for n in range(1, CALLS)]
        calls[0].result()
        serving.stop()
        codes = {call.code() for call in calls}
        assert codes <= {grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE}
        with pytest.raises(grpc.RpcError) as caught:
            stub.Attend(attend_request([1]), timeout=PATIENCE_SECONDS)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE

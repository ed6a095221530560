"""A server that listens on a Unix domain socket beside its port."""

import dataclasses
import socket
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
from tests.server.api.test_server_limits import OPTIONS
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


def test_the_file_is_there_while_the_server_listens(serving: Serving, path: Path) -> None:
    assert path.is_socket()
    assert list(path.parent.iterdir()) == [path]
    serving.stop()
    assert list(path.parent.iterdir()) == []


def test_a_second_server_is_refused_and_the_first_goes_on(serving: Serving, path: Path) -> None:
    second = RpcServer(dataclasses.replace(OPTIONS, unix_socket=path, max_concurrent_calls=CALLS), Calls())
    with pytest.raises(BindError, match=f"{path}: another process listens on it"):
        second.bind()
    second.stop(0)
    assert ask(serving.targets[0]).HasField("context_vectors")


def test_a_socket_that_nobody_listens_on_is_replaced(path: Path, engine: Engine) -> None:
    with socket.socket(socket.AF_UNIX) as ended:
        ended.bind(str(path))
    serving = Serving(path, engine)
    assert ask(serving.targets[0]).HasField("context_vectors")
    serving.stop()


def test_a_later_server_keeps_its_socket_when_the_earlier_one_ends(
    serving: Serving, path: Path, engine: Engine
) -> None:
    path.unlink()
    later = Serving(path, engine)
    serving.stop()
    assert ask(later.targets[0]).HasField("context_vectors")
    later.stop()


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


def test_another_file_is_refused_and_kept(path: Path) -> None:
    path.write_text("kept")
    with pytest.raises(BindError, match=f"{path}: there is a file that is not a socket"):
        UnixSocket(path).prepare()
    assert path.read_text() == "kept"


def test_a_path_in_a_folder_that_does_not_exist_is_refused(path: Path) -> None:
    with pytest.raises(BindError, match="the folder does not exist"):
        UnixSocket(path / "socket").prepare()


def test_the_longest_path_is_stated(path: Path) -> None:
    def with_length(length: int) -> Path:
        return path.with_name("s" * (length - len(str(path.parent)) - 1))

    with pytest.raises(BindError) as caught:
        UnixSocket(with_length(MAX_PATH_BYTES)).prepare()
    longest = int(str(caught.value).split()[-2])
    assert UnixSocket(with_length(longest)).prepare()
    with pytest.raises(BindError):
        UnixSocket(with_length(longest + 1)).prepare()

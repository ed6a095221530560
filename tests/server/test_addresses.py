"""A port that only the processes of one service can use."""

import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from attention_serving.server.addresses import reserve
from attention_serving.server.errors import BindError

HOST = "127.0.0.1"


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def reserved(stack: ExitStack, host: str, port: int) -> int:
    """Reserves a port until the end of the test; returns it."""
    ports = {stack.enter_context(each).getsockname()[1] for each in reserve(host, port)}
    (found,) = ports
    return int(found)


def sock(stack: ExitStack, *options: int) -> socket.socket:
    """A socket as other programs create it."""
    made = stack.enter_context(socket.socket())
    for option in options:
        made.setsockopt(socket.SOL_SOCKET, option, 1)
    return made


@pytest.mark.parametrize("host", [HOST, "0.0.0.0", "localhost"])  # noqa: S104 - bound for a moment on the test machine
def test_workers_can_listen_and_share_connections(stack: ExitStack, host: str) -> None:
    port = reserved(stack, host, 0)
    workers = [sock(stack, socket.SO_REUSEADDR, socket.SO_REUSEPORT) for _ in range(2)]
    for worker in workers:
        worker.bind((HOST, port))
        worker.listen()
        worker.settimeout(0)
    calls = 64
    for _ in range(calls):
        stack.enter_context(socket.create_connection((HOST, port)))
    accepted = [len(list(accept_all(worker, stack))) for worker in workers]
    assert sum(accepted) == calls
    assert min(accepted) > 0


def accept_all(listener: socket.socket, stack: ExitStack) -> Iterator[socket.socket]:
    """Every pending connection."""
    while True:
        try:
            yield stack.enter_context(listener.accept()[0])
        except BlockingIOError:
            return


@pytest.mark.parametrize(
    "options",
    [(), (socket.SO_REUSEADDR,), (socket.SO_REUSEPORT,), (socket.SO_REUSEADDR, socket.SO_REUSEPORT)],
    ids=["plain", "reuseaddr", "reuseport", "both"],
)
def test_a_port_in_use_is_refused(stack: ExitStack, options: tuple[int, ...]) -> None:
    other = sock(stack, *options)
    other.bind((HOST, 0))
    other.listen()
    port = other.getsockname()[1]
    with pytest.raises(BindError, match=rf"cannot listen on {HOST}:{port}: .*in use"):
        reserve(HOST, port)


def test_a_reserved_port_is_refused(stack: ExitStack) -> None:
    port = reserved(stack, HOST, 0)
    with pytest.raises(BindError, match="in use"):
        reserve(HOST, port)


@pytest.mark.parametrize("options", [(), (socket.SO_REUSEADDR,)], ids=["plain", "reuseaddr"])
def test_other_sockets_cannot_bind_a_reserved_port(stack: ExitStack, options: tuple[int, ...]) -> None:
    port = reserved(stack, HOST, 0)
    with pytest.raises(OSError, match="in use"):
        sock(stack, *options).bind((HOST, port))


def test_connections_are_refused_until_a_worker_listens(stack: ExitStack) -> None:
    port = reserved(stack, HOST, 0)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((HOST, port))


def test_closing_connections_do_not_block_the_port(stack: ExitStack) -> None:
    listener = sock(stack, socket.SO_REUSEADDR)
    listener.bind((HOST, 0))
    listener.listen()
    port = listener.getsockname()[1]
    caller = stack.enter_context(socket.create_connection((HOST, port)))
    accepted, _ = listener.accept()
    accepted.close()  # the first to close is the one whose port stays in TIME_WAIT
    caller.close()
    listener.close()
    assert reserved(stack, HOST, port) == port


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid"], ids=["another machine", "unknown"])
def test_a_host_of_another_machine_is_refused(host: str) -> None:
    with pytest.raises(BindError, match=f"cannot listen on {host}:0: "):
        reserve(host, 0)


def test_the_port_is_free_afterwards(stack: ExitStack) -> None:
    with ExitStack() as service:
        port = reserved(service, HOST, 0)
    sock(stack).bind((HOST, port))

"""A port that only the processes of one service can use; and which addresses need TLS."""

import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from attention_serving.server.addresses import address_of, check_exposure, listen, reserve
from attention_serving.server.errors import ServerError

HOST = "127.0.0.1"


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def reserved(stack: ExitStack, host: str, port: int) -> int:
    """Reserves a port until the end of the test; returns it."""
    (found,) = {int(stack.enter_context(each).getsockname()[1]) for each in reserve(host, port)}
    return found


def sock(stack: ExitStack, *options: int) -> socket.socket:
    """A socket as other programs create it."""
    made = stack.enter_context(socket.socket())
    for option in options:
        made.setsockopt(socket.SOL_SOCKET, option, 1)
    return made


@pytest.mark.parametrize("options", [(), (socket.SO_REUSEADDR,), (socket.SO_REUSEPORT,)], ids=str)
def test_a_port_in_use_is_refused(stack: ExitStack, options: tuple[int, ...]) -> None:
    other = sock(stack, *options)
    other.bind((HOST, 0))
    other.listen()
    port = other.getsockname()[1]
    with pytest.raises(ServerError, match=rf"cannot listen on {HOST}:{port}: .*in use"):
        reserve(HOST, port)
    with pytest.raises(ServerError, match=rf"cannot listen on {HOST}:{port} for HTTP: .*in use"):
        listen(HOST, port)


def test_a_reserved_port_is_refused_until_it_is_free(stack: ExitStack) -> None:
    with ExitStack() as service:
        port = reserved(service, "localhost", 0)
        with pytest.raises(ServerError, match="in use"):
            reserve(HOST, port)
        for options in ((), (socket.SO_REUSEADDR,)):
            with pytest.raises(OSError, match="in use"):
                sock(stack, *options).bind((HOST, port))
    sock(stack).bind((HOST, port))


def test_closing_connections_do_not_block_the_port(stack: ExitStack) -> None:
    port = 0
    for _ in range(2):  # the second time after a service that has just ended
        (listener,) = listen(HOST, port)
        port = listener.getsockname()[1]
        caller = stack.enter_context(socket.create_connection((HOST, port)))
        listener.accept()[0].close()  # the first to close is the one whose port stays in TIME_WAIT
        caller.close()
        listener.close()
    assert reserved(stack, HOST, port) == port


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid"], ids=["another machine", "unknown"])
def test_a_host_of_another_machine_is_refused(host: str) -> None:
    with pytest.raises(ServerError, match=f"cannot listen on {host}:0: "):
        reserve(host, 0)
    if host.endswith(".invalid"):
        with pytest.raises(ServerError, match=f"cannot listen on {host}: "):
            check_exposure(host, encrypted=False, insecure=False)


@pytest.mark.parametrize(("host", "text"), [("::1", "[::1]:7"), ("[::1]", "[::1]:7"), ("a", "a:7")])
def test_an_address_has_brackets_where_it_needs_them(host: str, text: str) -> None:
    assert address_of(host, 7) == text


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "[::]", "10.1.2.3", "0"])  # noqa: S104 - refused
def test_a_public_address_needs_a_certificate_or_the_operators_word(host: str) -> None:
    with pytest.raises(ServerError, match=r"--tls-certificate and --tls-key, or listen on 127.0.0.1, or"):
        check_exposure(host, encrypted=False, insecure=False)
    check_exposure(host, encrypted=True, insecure=False)
    check_exposure(host, encrypted=False, insecure=True)


@pytest.mark.parametrize("host", ["127.8.9.10", "::1", "[::1]", "localhost", "::ffff:127.0.0.1", "127.1"])
def test_loopback_needs_nothing(host: str) -> None:
    check_exposure(host, encrypted=False, insecure=False)

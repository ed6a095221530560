"""Retries, waiting for a server, load balancing, metadata, closing and message sizes, over real gRPC."""

import asyncio
import inspect
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_server import Service, reserved_port, running, unavailable

from attention_client import (
    AsyncAttentionClient,
    AttentionClient,
    AttentionClientError,
    ClientClosedError,
    DeadlineExceededError,
    InvalidArgumentError,
    LimitExceededError,
    MessageTooLargeError,
    ResourceExhaustedError,
    TlsFiles,
    UnauthenticatedError,
    UnavailableError,
)

QUERY = np.arange(6, dtype=np.float32).reshape(2, 3)
TOKEN = "secret"  # noqa: S105 - of no service
# More than gRPC's own limit of a repeated call, 256 KiB.
LARGE = np.ones((1000, 100), np.float32)
NOWHERE = "127.0.0.1:1"
ASKED: dict[str, Callable[..., Any]] = {
    "attend": lambda client, query, timeout: client.attend("m", query, timeout=timeout),
    "stream": lambda client, query, timeout: client.attend_stream("m", [query], timeout=timeout),
    "wait": lambda client, _, timeout: client.wait_until_ready(timeout),
    "ready": lambda client, _, timeout: client.is_ready(timeout=timeout),
}


class Call:
    """Makes one call with a client of its own; of a stream, with one request."""

    def __init__(self, name: str) -> None:
        self._is_async, self._method = name.startswith("async "), ASKED[name.removeprefix("async ")]

    def __call__(
        self, target: Any, query: Any = QUERY, *, timeout: float | None = None, **options: Any
    ) -> Any:
        if self._is_async:
            return asyncio.run(self._awaited(target, query, timeout, options))
        with AttentionClient(target, **options) as client:
            found = self._method(client, query, timeout)
            return next(found) if hasattr(found, "__next__") else found

    async def _awaited(self, target: Any, query: Any, timeout: float | None, options: dict[str, Any]) -> Any:
        async with AsyncAttentionClient(target, **options) as client:
            found = self._method(client, query, timeout)
            return await (anext(found) if hasattr(found, "__anext__") else found)


def calls(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("call", [Call(name) for name in names], ids=names)


BOTH_CLIENTS = calls("attend", "async attend")
EVERY_CALL = calls("attend", "async attend", "stream", "async stream")
CALLS_AND_WAITS = calls("attend", "async stream", "wait", "async wait")


@pytest.fixture
def held() -> Iterator[tuple[Service, threading.Event, threading.Event]]:
    """A service that holds its calls, an event that says that it has one, and an event that releases them."""
    entered, released = threading.Event(), threading.Event()

    def hold(_: grpc.ServicerContext) -> None:
        entered.set()
        released.wait(60)

    yield Service(hold), entered, released
    released.set()


@EVERY_CALL
def test_an_unavailable_call_is_repeated_up_to_max_retries(call: Call):
    service = Service(unavailable(2))
    with running(service) as target:
        result = call(target, LARGE)
    np.testing.assert_array_equal(result.context_vectors, LARGE)
    assert len(service.attempts) == 3
    for max_retries in (0, 1):
        service = Service(unavailable(5))
        with running(service) as target, pytest.raises(UnavailableError, match="restarting"):
            call(target, max_retries=max_retries)
        assert len(service.attempts) == max_retries + 1


def test_other_errors_are_not_repeated():
    service = Service(lambda context: context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "full"))
    with running(service) as target, pytest.raises(ResourceExhaustedError, match="full"):
        Call("attend")(target)
    assert len(service.attempts) == 1


@EVERY_CALL
def test_a_call_waits_for_a_server_that_starts(call: Call):
    results: list[Any] = []
    with reserved_port() as port:
        asking = threading.Thread(target=lambda: results.append(call(f"127.0.0.1:{port}", timeout=60)))
        asking.start()
        asking.join(0.3)  # by now the first attempt to connect has been refused
        assert not results
        with running(Service(), port=port):
            asking.join(60)
    np.testing.assert_array_equal(results[0].context_vectors, QUERY)


@EVERY_CALL
def test_a_server_that_does_not_start_in_time_is_unavailable_without_waiting_at_once(call: Call):
    with pytest.raises(UnavailableError, match=r"no connection to .* within 0.3 s: .*refused") as caught:
        call(NOWHERE, timeout=0.3)
    assert "TLS" not in caught.value.message
    with pytest.raises(UnavailableError, match="refused"):
        call(NOWHERE, timeout=60, wait_for_ready=False, max_retries=0)


@EVERY_CALL
def test_a_server_that_does_not_answer_in_time_exceeds_the_deadline(call: Call, held: Any):
    with running(held[0]) as target:
        with pytest.raises(DeadlineExceededError, match=r"did not answer within 0.2 s"):
            call(target, timeout=0.2)
        held[2].set()


@BOTH_CLIENTS
def test_an_attempt_without_an_answer_is_repeated_up_to_max_retries(call: Call):
    released, remaining = threading.Event(), iter(range(4))
    service = Service(lambda _: next(remaining, None) is not None and released.wait(60) and None)
    with running(service) as target:
        with pytest.raises(DeadlineExceededError, match="within attempt_timeout"):
            call(target, attempt_timeout=0.2, max_retries=1)
        np.testing.assert_array_equal(call(target, attempt_timeout=0.2).context_vectors, QUERY)
        released.set()
    assert len(service.attempts) == 2 + 3


def test_several_targets_are_used_in_turn():
    first, second = Service(), Service()
    with running(first) as one, running(second) as other, AttentionClient([one, other]) as client:
        client.wait_until_ready()
        for _ in range(40):
            client.attend("m", QUERY)
    assert len(first.attempts) + len(second.attempts) == 40
    assert min(len(first.attempts), len(second.attempts)) >= 5


def test_a_target_that_is_down_does_not_disturb_the_others_and_names_are_resolved():
    service = Service()
    with running(service) as target:
        name = target.replace("127.0.0.1", "localhost")
        with AttentionClient([name, NOWHERE]) as client:
            for _ in range(10):
                client.attend("m", QUERY)
    assert len(service.attempts) == 10
    with pytest.raises(UnavailableError, match=r"nonesuch\.invalid:1"):
        AttentionClient([NOWHERE, "nonesuch.invalid:1"])


@EVERY_CALL
def test_metadata_and_the_token_are_sent_with_every_call(call: Call):
    service = Service()
    with running(service) as target:
        call(target, token=TOKEN, metadata={"X-Tenant": "a", "x-id-bin": b"\0"})
    (seen,) = service.attempts
    assert (seen["authorization"], seen["x-tenant"], seen["x-id-bin"]) == ("Bearer secret", "a", b"\0")


def test_a_token_is_sent_over_an_unencrypted_connection_on_this_machine_only():
    for target in ("localhost:1", "[::1]:1", "unix:/tmp/s", "dns:///localhost:1", "ipv4:127.0.0.1:1"):
        AttentionClient(target, token=TOKEN).close()
    for other in ("server:8001", [NOWHERE, "10.0.0.1:1"], "dns:///server:8001"):
        with pytest.raises(InvalidArgumentError, match="token: expected credentials") as caught:
            AttentionClient(other, token=TOKEN)
        assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"target": 5}, "target"),
        ({"target": []}, "target"),
        ({"target": ["a:1", "b"]}, "target"),
        ({"target": ["a:1", "b:70000"]}, "target"),
        ({"target": ["a:1", "dns:///b:1"]}, "target"),
        ({"credentials": "tls"}, "credentials"),
        ({"token": ""}, "token"),
        ({"token": "a\nb"}, "token"),
        ({"metadata": 3}, "metadata"),
        ({"metadata": {"a b": "c"}}, "metadata"),
        ({"metadata": {"grpc-x": "c"}}, "metadata"),
        ({"metadata": {"a": b"c"}}, "metadata['a']"),
        ({"metadata": [("a", "ü")]}, "metadata['a']"),
        ({"timeout": "5"}, "timeout"),
        ({"timeout": float("inf")}, "timeout"),
        ({"attempt_timeout": 0}, "attempt_timeout"),
        ({"attempt_timeout": 1, "max_retries": 0}, "attempt_timeout"),
        ({"max_retries": 5}, "max_retries"),
        ({"max_retries": True}, "max_retries"),
        ({"compression": []}, "compression"),
        ({"wire": "fp8"}, "wire"),
        ({"wire": None}, "wire"),
        ({"max_message_bytes": 0}, "max_message_bytes"),
        ({"max_message_bytes": 2**31}, "max_message_bytes"),
        ({"channel_options": {"grpc.max_send_message_length": None}}, "channel_options"),
        ({"channel_options": {3: 5}}, "channel_options"),
    ],
)
async def test_wrong_settings_are_refused(arguments: dict[str, Any], field: str):
    for client_class in (AttentionClient, AsyncAttentionClient):
        with pytest.raises(InvalidArgumentError) as caught:
            client_class(**arguments)
        assert caught.value.field == field


def test_both_clients_have_the_same_methods_and_the_asynchronous_one_needs_a_running_loop():
    names = [name for name in dir(AttentionClient) if not name.startswith("_")]
    assert names == [name for name in dir(AsyncAttentionClient) if not name.startswith("_")]
    for name in names:
        one, other = getattr(AttentionClient, name), getattr(AsyncAttentionClient, name)
        assert [*inspect.signature(one).parameters] == [*inspect.signature(other).parameters]
        assert inspect.iscoroutinefunction(other) == (name != "attend_stream")
    with pytest.raises(AttentionClientError, match="event loop"):
        AsyncAttentionClient()


@pytest.mark.parametrize("name", ASKED)
async def test_a_closed_client_raises_its_own_error(name: str):
    client = AttentionClient(NOWHERE)
    client.close()
    client.close()
    with pytest.raises(ClientClosedError, match="closed"):
        list(ASKED[name](client, QUERY, None))
    other = AsyncAttentionClient(NOWHERE)
    await other.close()
    await other.close()
    called = ASKED[name](other, QUERY, None)
    with pytest.raises(ClientClosedError, match="closed"):
        await (anext(called) if hasattr(called, "__anext__") else called)


@pytest.mark.parametrize("name", ["attend", "stream"])
async def test_closing_ends_a_call_in_progress(name: str, held: Any):
    service, entered, released = held
    with running(service) as target:
        client = AttentionClient(target)
        threading.Thread(target=lambda: entered.wait(60) and client.close()).start()
        with pytest.raises(ClientClosedError):
            list(ASKED[name](client, QUERY, None))
        entered.clear()
        other = AsyncAttentionClient(target)
        called = ASKED[name](other, QUERY, None)
        asked = asyncio.ensure_future(anext(called) if hasattr(called, "__anext__") else called)
        await asyncio.to_thread(entered.wait, 60)
        await other.close()
        with pytest.raises(ClientClosedError):
            await asked
        released.set()


@EVERY_CALL
def test_a_request_that_is_too_large_for_the_client_names_both_settings(call: Call):
    expected = (
        r"the request is 40\d{4} bytes; the client allows 1000\..*max_message_bytes.*--max-message-bytes"
    )
    with running(Service()) as target, pytest.raises(MessageTooLargeError, match=expected) as caught:
        call(target, LARGE, max_message_bytes=1000)
    assert isinstance(caught.value, LimitExceededError)
    assert isinstance(caught.value, ResourceExhaustedError)
    assert caught.value.reason == "MESSAGE_TOO_LARGE"


@BOTH_CLIENTS
def test_a_message_that_is_too_large_for_the_other_side_names_both_settings(call: Call):
    options = {"grpc.max_receive_message_length": 100_000}
    with running(Service()) as target, pytest.raises(MessageTooLargeError, match=r"the response is .* bytes"):
        call(target, LARGE, channel_options=options)
    expected = r"the request is .* bytes; the server allows 100000"
    limited = running(Service(), options=list(options.items()))
    with limited as target, pytest.raises(MessageTooLargeError, match=expected):
        call(target, LARGE)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory):
    """A self-signed certificate for localhost: (key, certificate) as PEM."""
    folder: Path = tmp_path_factory.mktemp("tls")
    command = "openssl req -x509 -nodes -days 2 -subj /CN=localhost -newkey ec -pkeyopt"
    command += (
        " ec_paramgen_curve:prime256v1 -addext subjectAltName=DNS:localhost -keyout key -out certificate"
    )
    subprocess.run(command.split(), cwd=folder, check=True, capture_output=True, timeout=60)
    return (folder / "key").read_bytes(), (folder / "certificate").read_bytes()


@BOTH_CLIENTS
def test_an_encrypted_connection_to_several_targets_carries_the_token(
    call: Call, certificate: tuple[bytes, bytes]
):
    service = Service()
    credentials = grpc.ssl_channel_credentials(certificate[1])
    with running(service, credentials=grpc.ssl_server_credentials([certificate])) as target:
        name = target.replace("127.0.0.1", "localhost")
        for targets in (name, [name, target]):
            call(targets, credentials=credentials, token=TOKEN)
    assert [attempt["authorization"] for attempt in service.attempts] == ["Bearer secret"] * 2


@CALLS_AND_WAITS
def test_a_client_that_encrypts_where_the_server_does_not_or_the_reverse_is_told(
    call: Call, certificate: tuple[bytes, bytes]
):
    encrypted = running(Service(), credentials=grpc.ssl_server_credentials([certificate]))
    expected = r"pass credentials=TlsFiles.*\(--tls or --ca FILE\)$"
    with encrypted as target, pytest.raises(AttentionClientError, match=expected):
        call(target, timeout=0.5)
    expected = "the server does not use TLS: omit credentials"
    with running(Service()) as target, pytest.raises(AttentionClientError, match=expected):
        call(target, timeout=0.5, credentials=TlsFiles())


@EVERY_CALL
@pytest.mark.parametrize("token", [None, TOKEN], ids=["without-token", "wrong-token"])
def test_a_client_without_a_token_is_told_how_to_pass_one(call: Call, token: str | None):
    refusing = Service(lambda context: context.abort(grpc.StatusCode.UNAUTHENTICATED, "a token is required"))
    with running(refusing) as target, pytest.raises(UnauthenticatedError) as caught:
        call(target, token=token)
    hint = "; pass token= to the client (--token or ATTENTION_TOKEN on the command line)"
    assert str(caught.value) == caught.value.message == f"a token is required{'' if token else hint}"


def test_a_version_is_an_integer_or_a_str_and_readiness_is_asked_once():
    with running(Service()) as target, AttentionClient(target) as client:
        assert client.is_ready()
        for version in (3, "3", np.int64(3)):
            assert client.attend("m", QUERY, version=version).model_version == "3"
            assert client.model("m", version).version == "3"
            assert next(client.attend_stream("m", [QUERY], version=version)).model_version == "3"
    with AttentionClient(NOWHERE) as client, pytest.raises(UnavailableError):
        client.is_ready(timeout=5)

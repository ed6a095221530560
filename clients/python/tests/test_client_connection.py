"""Retries, waiting for a server, load balancing, metadata, closing and message sizes, over real gRPC."""

import asyncio
import inspect
import threading
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_server import Service, reserved_port, running, unavailable

from attention_client import AsyncAttentionClient, AttentionClient, errors
from attention_client._connection.settings import proxy_variable

QUERY = np.arange(6, dtype=np.float32).reshape(2, 3)
TOKEN = "secret"  # noqa: S105 - of no service
# More than gRPC's own limit of a repeated call, 256 KiB.
LARGE = np.ones((1000, 100), np.float32)
NOWHERE = "127.0.0.1:1"
METHODS: dict[str, Callable[..., Any]] = {
    "attend": lambda client, query, timeout: client.attend("m", query, timeout=timeout),
    "stream": lambda client, query, timeout: client.attend_stream("m", [query], timeout=timeout),
    "wait": lambda client, _, timeout: client.wait_until_ready(timeout),
    "ready": lambda client, _, timeout: client.is_ready(timeout=timeout),
}


async def first(call: Any) -> Any:
    """What is awaited, or the first item of a stream."""
    return await (anext(call) if hasattr(call, "__anext__") else call)


def call_once(
    name: str, target: Any, query: Any = QUERY, *, timeout: float | None = None, **options: Any
) -> Any:
    """Makes one call with a client of its own; of a stream, with one request."""
    method = METHODS[name.removeprefix("async ")]

    async def call_async() -> Any:
        async with AsyncAttentionClient(target, **options) as client:
            return await first(method(client, query, timeout))

    if name.startswith("async "):
        return asyncio.run(call_async())
    with AttentionClient(target, **options) as client:
        result = method(client, query, timeout)
        return next(result) if hasattr(result, "__next__") else result


Call = Callable[..., Any]
CALLS = {name: partial(call_once, name) for name in ("attend", "async attend", "stream", "async stream")}
EVERY_CALL = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)


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
        with running(service) as target, pytest.raises(errors.UnavailableError, match="restarting"):
            call(target, max_retries=max_retries)
        assert len(service.attempts) == max_retries + 1


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
    with pytest.raises(errors.UnavailableError, match=r"no connection to .* within 0.3 s: .*refused"):
        call(NOWHERE, timeout=0.3)
    with pytest.raises(errors.UnavailableError, match="refused") as caught:
        call(NOWHERE, timeout=60, wait_for_ready=False, max_retries=0)
    assert "".join(traceback.format_exception(caught.value)).count("Traceback") == 1
    assert isinstance(caught.value.__context__, grpc.RpcError)


def test_a_proxy_of_the_environment_is_named_and_not_used_for_this_machine(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("http_proxy", f"http://{NOWHERE}")
    with running(Service()) as target:
        call_once("attend", target)
    expected = "through the proxy in http_proxy; no_proxy may exempt"
    for wait in (True, False):
        with pytest.raises(errors.UnavailableError, match=expected):
            call_once("attend", "192.0.2.1:1", timeout=0.3, wait_for_ready=wait, max_retries=0)
    monkeypatch.setenv("no_proxy", "a.example")
    assert not proxy_variable(["dns:///b.a.example:1"], ())
    assert not proxy_variable(["b.example:1"], [("grpc.enable_http_proxy", 0)])
    assert proxy_variable(["a.example:1", "b.example:1"], ()) == "http_proxy"


@EVERY_CALL
def test_a_server_that_does_not_answer_in_time_exceeds_the_deadline(call: Call, held: Any):
    with running(held[0]) as target:
        with pytest.raises(errors.DeadlineExceededError, match=r"did not answer within 0.2 s"):
            call(target, timeout=0.2)
        held[2].set()


@pytest.mark.parametrize("call", [CALLS["attend"], CALLS["async attend"]], ids=["attend", "async attend"])
def test_an_attempt_without_an_answer_is_repeated_up_to_max_retries(call: Call):
    released, remaining = threading.Event(), iter(range(4))
    service = Service(lambda _: next(remaining, None) is not None and released.wait(60) and None)
    with running(service) as target:
        with pytest.raises(errors.DeadlineExceededError, match="within attempt_timeout"):
            call(target, attempt_timeout=0.2, max_retries=1)
        np.testing.assert_array_equal(call(target, attempt_timeout=0.2).context_vectors, QUERY)
        released.set()
    assert len(service.attempts) == 2 + 3


def test_several_targets_are_used_in_turn_without_those_that_are_down_and_names_are_resolved():
    first, second = Service(), Service()
    with running(first) as one, running(second) as other:
        client = AttentionClient([one.replace("127.0.0.1", "localhost"), other, NOWHERE])
        client.wait_until_ready()
        for _ in range(40):
            client.attend("m", QUERY)
        client.close()
    assert len(first.attempts) + len(second.attempts) == 40
    assert min(len(first.attempts), len(second.attempts)) >= 5
    with pytest.raises(errors.UnavailableError, match=r"nonesuch\.invalid:1"):
        AttentionClient([NOWHERE, "nonesuch.invalid:1"])


def test_the_answers_of_two_models_are_not_mixed():
    service = Service()
    with running(service) as target, AttentionClient(target) as client:
        several = AttentionClient([target, NOWHERE])
        for mix in (
            lambda: list(client.attend_stream("m", [QUERY, QUERY], return_exceptions=True)),
            lambda: client.embed("m", ["text"] * 1025),
            lambda: [several.attend("m", QUERY) for _ in range(2)],
        ):
            service.digests = iter("ab")
            changed = "has changed: there are answers with the digests a and b"
            with pytest.raises(errors.ModelChangedError, match=changed):
                mix()
        several.close()
        service.digests = iter("ab")
        assert [client.attend("m", QUERY).model_digest for _ in range(2)] == ["a", "b"]
    assert [request.model_version for request in service.requests[:2]] == ["", "3"]  # of embed


@EVERY_CALL
@pytest.mark.parametrize("token", [None, "wrong"])
def test_a_client_without_a_token_is_told_how_to_pass_one(call: Call, token: str | None):
    refusing = Service(lambda context: context.abort(grpc.StatusCode.UNAUTHENTICATED, "a token is required"))
    with running(refusing) as target, pytest.raises(errors.UnauthenticatedError) as caught:
        call(target, token=token)
    hint = "; pass token= to the client (--token or ATTENTION_TOKEN on the command line)"
    assert str(caught.value) == caught.value.message == f"a token is required{'' if token else hint}"


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
        with pytest.raises(errors.InvalidArgumentError, match="token: expected credentials") as caught:
            AttentionClient(other, token=TOKEN)
        assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"target": ["a:1", "b"]}, "target"),
        ({"target": ["a:1", "b:70000"]}, "target"),
        ({"token": ""}, "token"),
        ({"metadata": {"grpc-x": "c"}}, "metadata"),
        ({"metadata": {"a": b"c"}}, "metadata['a']"),
        ({"metadata": [("a", "ü")]}, "metadata['a']"),
        ({"attempt_timeout": 1, "max_retries": 0}, "attempt_timeout"),
        ({"max_retries": 5}, "max_retries"),
        ({"wire": "fp8"}, "wire"),
        ({"max_message_bytes": 0}, "max_message_bytes"),
        ({"channel_options": {"grpc.max_send_message_length": None}}, "channel_options"),
    ],
)
async def test_wrong_settings_are_refused(arguments: dict[str, Any], field: str):
    for client_class in (AttentionClient, AsyncAttentionClient):
        with pytest.raises(errors.InvalidArgumentError) as caught:
            client_class(**arguments)
        assert caught.value.field == field


def test_both_clients_have_the_same_methods_and_the_asynchronous_one_needs_a_running_loop():
    names = [name for name in dir(AttentionClient) if not name.startswith("_")]
    assert names == [name for name in dir(AsyncAttentionClient) if not name.startswith("_")]
    for name in names:
        one, other = getattr(AttentionClient, name), getattr(AsyncAttentionClient, name)
        assert [*inspect.signature(one).parameters] == [*inspect.signature(other).parameters]
        assert inspect.iscoroutinefunction(other) == (name != "attend_stream")
    with pytest.raises(errors.AttentionClientError, match="while an event loop runs"):
        AsyncAttentionClient()


@pytest.mark.parametrize("name", METHODS)
def test_an_asynchronous_client_belongs_to_one_event_loop(name: str):
    async def create() -> AsyncAttentionClient:
        return AsyncAttentionClient(NOWHERE)

    client = asyncio.run(create())
    with pytest.raises(errors.AttentionClientError, match=r"create a client in each asyncio\.run"):
        asyncio.run(first(METHODS[name](client, QUERY, None)))
    asyncio.run(client.close())


@pytest.mark.parametrize("name", METHODS)
async def test_a_closed_client_raises_its_own_error(name: str):
    client, other = AttentionClient(NOWHERE), AsyncAttentionClient(NOWHERE)
    for _ in range(2):
        client.close()
        await other.close()
    with pytest.raises(errors.ClientClosedError, match="closed"):
        list(METHODS[name](client, QUERY, None))
    with pytest.raises(errors.ClientClosedError, match="closed"):
        await first(METHODS[name](other, QUERY, None))


@pytest.mark.parametrize("name", ["attend", "stream"])
async def test_closing_ends_a_call_in_progress(name: str, held: Any):
    service, entered, released = held
    with running(service) as target:
        client, other = AttentionClient(target), AsyncAttentionClient(target)
        threading.Thread(target=lambda: entered.wait(60) and client.close()).start()
        with pytest.raises(errors.ClientClosedError):
            list(METHODS[name](client, QUERY, None))
        entered.clear()
        asked = asyncio.ensure_future(first(METHODS[name](other, QUERY, None)))
        await asyncio.to_thread(entered.wait, 60)
        await other.close()
        with pytest.raises(errors.ClientClosedError):
            await asked
        released.set()


@EVERY_CALL
def test_a_message_that_is_too_large_names_both_settings(call: Call):
    options = {"grpc.max_receive_message_length": 100_000}
    settings = ".*max_message_bytes.*--max-message-bytes"
    with running(Service()) as target:
        with pytest.raises(errors.MessageTooLargeError, match=f"CLIENT: Sent.*1000{settings}") as caught:
            call(target, LARGE, max_message_bytes=1000)
        with pytest.raises(errors.MessageTooLargeError, match=f"CLIENT: Received.*100000{settings}"):
            call(target, LARGE, channel_options=options)
    assert isinstance(caught.value, errors.LimitExceededError)
    assert isinstance(caught.value, errors.ResourceExhaustedError)
    assert caught.value.reason == "MESSAGE_TOO_LARGE"
    limited = running(Service(), options=list(options.items()))
    with (
        limited as target,
        pytest.raises(errors.MessageTooLargeError, match=f"SERVER: Received.*100000{settings}"),
    ):
        call(target, LARGE)

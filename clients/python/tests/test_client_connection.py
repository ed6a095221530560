"""Retries, waiting for a server, load balancing, metadata, closing and message sizes, over real gRPC."""

import asyncio
import subprocess
import threading
import time
from collections.abc import Callable
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


def attend_sync(target: Any, query: Any = QUERY, *, timeout: float | None = None, **options: Any):
    with AttentionClient(target, **options) as client:
        return client.attend("m", query, timeout=timeout)


def attend_async(target: Any, query: Any = QUERY, *, timeout: float | None = None, **options: Any):
    async def ask() -> Any:
        async with AsyncAttentionClient(target, **options) as client:
            return await client.attend("m", query, timeout=timeout)

    return asyncio.run(ask())


def stream_sync(target: Any, query: Any = QUERY, *, timeout: float | None = None, **options: Any):
    with AttentionClient(target, **options) as client:
        (result,) = client.attend_stream("m", [query], timeout=timeout)
        return result


def stream_async(target: Any, query: Any = QUERY, *, timeout: float | None = None, **options: Any):
    async def ask() -> Any:
        async with AsyncAttentionClient(target, **options) as client:
            (result,) = [item async for item in client.attend_stream("m", [query], timeout=timeout)]
            return result

    return asyncio.run(ask())


Call = Callable[..., Any]
EVERY_CALL = pytest.mark.parametrize("call", [attend_sync, attend_async, stream_sync, stream_async])
BOTH_CLIENTS = pytest.mark.parametrize("call", [attend_sync, attend_async])


@EVERY_CALL
@pytest.mark.parametrize("query", [QUERY, LARGE], ids=["small", "large"])
def test_an_unavailable_call_is_repeated(call: Call, query: Any):
    service = Service(unavailable(2))
    with running(service) as target:
        result = call(target, query)
    np.testing.assert_array_equal(result.context_vectors, query)
    assert len(service.attempts) == 3


@EVERY_CALL
@pytest.mark.parametrize("max_retries", [0, 1])
def test_a_call_is_repeated_up_to_max_retries(call: Call, max_retries: int):
    service = Service(unavailable(5))
    with running(service) as target, pytest.raises(UnavailableError, match="restarting"):
        call(target, max_retries=max_retries)
    assert len(service.attempts) == max_retries + 1


@BOTH_CLIENTS
def test_other_errors_are_not_repeated(call: Call):
    service = Service(lambda context: context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "full"))
    with running(service) as target, pytest.raises(ResourceExhaustedError, match="full"):
        call(target)
    assert len(service.attempts) == 1


@BOTH_CLIENTS
def test_retries_end_at_the_timeout(call: Call):
    begin = time.monotonic()
    errors = (UnavailableError, DeadlineExceededError)
    with running(Service(unavailable(5))) as target, pytest.raises(errors):
        call(target, timeout=0.2)
    assert time.monotonic() - begin < 5


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
def test_a_server_that_does_not_start_in_time_is_unavailable(call: Call):
    with pytest.raises(UnavailableError, match=r"no connection to 127.0.0.1:1 within 0.3 s: .*refused"):
        call("127.0.0.1:1", timeout=0.3)


@EVERY_CALL
def test_without_waiting_a_refused_connection_is_an_error_at_once(call: Call):
    with pytest.raises(UnavailableError, match="refused"):
        call("127.0.0.1:1", timeout=60, wait_for_ready=False, max_retries=0)


@EVERY_CALL
def test_a_server_that_does_not_answer_in_time_exceeds_the_deadline(call: Call):
    done = threading.Event()
    with running(Service(lambda _: done.wait(60) and None)) as target:
        with pytest.raises(DeadlineExceededError, match=r"did not answer within 0.2 s"):
            call(target, timeout=0.2)
        done.set()


@EVERY_CALL
def test_several_targets_are_used_in_turn(call: Call):
    first, second = Service(), Service()
    with running(first) as one, running(second) as other, AttentionClient([one, other]) as client:
        client.wait_until_ready()
        for _ in range(40):
            client.attend("m", QUERY)
        call((one, other))
    assert len(first.attempts) + len(second.attempts) == 41
    assert min(len(first.attempts), len(second.attempts)) >= 5


def test_a_target_that_is_down_does_not_disturb_the_others():
    service = Service()
    with running(service) as target, AttentionClient([target, "127.0.0.1:1"]) as client:
        for _ in range(10):
            client.attend("m", QUERY)
    assert len(service.attempts) == 10


def test_all_addresses_of_a_name_are_used():
    first, second = Service(), Service()
    with running(first) as one:
        port = int(one.rpartition(":")[2])
        target = f"ipv4:127.0.0.1:{port},127.0.0.2:{port}"
        with running(second, host="127.0.0.2", port=port), AttentionClient(target) as client:
            for _ in range(40):
                client.attend("m", QUERY)
    assert min(len(first.attempts), len(second.attempts)) >= 5


def test_several_names_are_resolved():
    service = Service()
    with running(service) as target:
        port = target.rpartition(":")[2]
        result = attend_sync([f"localhost:{port}", target])
    np.testing.assert_array_equal(result.context_vectors, QUERY)


def test_a_name_among_several_that_cannot_be_resolved_is_named():
    with pytest.raises(UnavailableError, match=r"nonesuch\.invalid:1"):
        AttentionClient(["127.0.0.1:1", "nonesuch.invalid:1"])


@EVERY_CALL
def test_metadata_and_the_token_are_sent_with_every_call(call: Call):
    service = Service()
    with running(service) as target:
        call(target, token=TOKEN, metadata={"X-Tenant": "a", "x-id-bin": b"\0"})
    (seen,) = service.attempts
    assert seen["authorization"] == "Bearer secret"
    assert (seen["x-tenant"], seen["x-id-bin"]) == ("a", b"\0")


@pytest.mark.parametrize("target", ["server:8001", ["127.0.0.1:1", "10.0.0.1:1"], "dns:///server:8001"])
def test_a_token_is_not_sent_over_an_unencrypted_connection_to_another_machine(target: Any):
    with pytest.raises(InvalidArgumentError, match="token: expected credentials") as caught:
        AttentionClient(target, token=TOKEN)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "target",
    ["localhost:1", "127.0.0.2:1", "[::1]:1", "unix:/tmp/s", "dns:///localhost:1", "ipv4:127.0.0.1:1"],
)
def test_a_token_may_be_sent_on_this_machine(target: str):
    AttentionClient(target, token=TOKEN).close()


@pytest.mark.parametrize("client_class", [AttentionClient, AsyncAttentionClient])
@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        pytest.param({"target": 5}, "target", id="target-number"),
        pytest.param({"target": []}, "target", id="no-targets"),
        pytest.param({"target": ""}, "target", id="empty-target"),
        pytest.param({"target": ["a:1", "b"]}, "target", id="no-port"),
        pytest.param({"target": ["a:1", "b:70000"]}, "target", id="port-too-large"),
        pytest.param({"target": ["a:1", "dns:///b:1"]}, "target", id="scheme-among-several"),
        pytest.param({"credentials": "tls"}, "credentials", id="credentials-text"),
        pytest.param({"token": ""}, "token", id="empty-token"),
        pytest.param({"token": "a\nb"}, "token", id="token-with-line-break"),
        pytest.param({"metadata": 3}, "metadata", id="metadata-number"),
        pytest.param({"metadata": {"a b": "c"}}, "metadata", id="metadata-key-with-space"),
        pytest.param({"metadata": {"grpc-x": "c"}}, "metadata", id="reserved-key"),
        pytest.param({"metadata": {"a": b"c"}}, "metadata['a']", id="bytes-for-text"),
        pytest.param({"metadata": [("a", "ü")]}, "metadata['a']", id="not-ascii"),
        pytest.param({"timeout": 0}, "timeout", id="no-time"),
        pytest.param({"timeout": "5"}, "timeout", id="timeout-text"),
        pytest.param({"timeout": float("nan")}, "timeout", id="timeout-nan"),
        pytest.param({"max_retries": 5}, "max_retries", id="too-many-retries"),
        pytest.param({"max_retries": True}, "max_retries", id="retries-boolean"),
        pytest.param({"compression": "brotli"}, "compression", id="unknown-compression"),
        pytest.param({"compression": []}, "compression", id="compression-list"),
        pytest.param({"max_message_bytes": 0}, "max_message_bytes", id="no-message"),
        pytest.param({"max_message_bytes": 2**31}, "max_message_bytes", id="message-too-large"),
        pytest.param(
            {"channel_options": {"grpc.max_send_message_length": None}},
            "channel_options",
            id="option-value",
        ),
        pytest.param({"channel_options": {3: 5}}, "channel_options", id="option-key"),
    ],
)
async def test_wrong_settings_are_refused(client_class: Any, arguments: dict[str, Any], field: str):
    with pytest.raises(InvalidArgumentError) as caught:
        client_class(**arguments)
    assert caught.value.field == field


def test_an_asynchronous_client_needs_a_running_loop():
    with pytest.raises(AttentionClientError, match="event loop"):
        AsyncAttentionClient()


CLOSED_CALLS = {
    "attend": lambda client: client.attend("m", QUERY),
    "models": lambda client: client.models(),
    "is_ready": lambda client: client.is_ready(),
    "wait_until_ready": lambda client: client.wait_until_ready(),
    "attend_stream": lambda client: client.attend_stream("m", [QUERY]),
}


@pytest.mark.parametrize("call", CLOSED_CALLS.values(), ids=CLOSED_CALLS.keys())
def test_a_closed_client_raises_its_own_error(call: Callable[[AttentionClient], Any]):
    client = AttentionClient("127.0.0.1:1")
    client.close()
    client.close()
    with pytest.raises(ClientClosedError, match="closed"):
        list(call(client))


@pytest.mark.parametrize("call", CLOSED_CALLS.values(), ids=CLOSED_CALLS.keys())
async def test_a_closed_asynchronous_client_raises_its_own_error(call: Callable[[AsyncAttentionClient], Any]):
    client = AsyncAttentionClient("127.0.0.1:1")
    await client.close()
    await client.close()
    called = call(client)
    with pytest.raises(ClientClosedError, match="closed"):
        await (anext(called) if hasattr(called, "__anext__") else called)


@pytest.mark.parametrize("kind", ["attend", "attend_stream"])
def test_closing_ends_a_call_in_progress(kind: str):
    entered, done = threading.Event(), threading.Event()

    def hold(_: grpc.ServicerContext) -> None:
        entered.set()
        done.wait(60)

    with running(Service(hold)) as target:
        client = AttentionClient(target)
        threading.Thread(target=lambda: entered.wait(60) and client.close()).start()
        with pytest.raises(ClientClosedError):
            list(CLOSED_CALLS[kind](client))
        done.set()


async def test_closing_ends_an_asynchronous_call_in_progress():
    entered, done = threading.Event(), threading.Event()

    def hold(_: grpc.ServicerContext) -> None:
        entered.set()
        done.wait(60)

    with running(Service(hold)) as target:
        client = AsyncAttentionClient(target)
        asked = asyncio.create_task(client.attend("m", QUERY))
        await asyncio.to_thread(entered.wait, 60)
        await client.close()
        with pytest.raises(ClientClosedError):
            await asked
        done.set()


@EVERY_CALL
def test_a_request_that_is_too_large_for_the_client_names_both_settings(call: Call):
    expected = (
        r"the request is 40\d\d\d\d bytes; the client allows 1000\..*max_message_bytes.*--max-message-bytes"
    )
    with running(Service()) as target, pytest.raises(MessageTooLargeError, match=expected) as caught:
        call(target, LARGE, max_message_bytes=1000)
    assert isinstance(caught.value, LimitExceededError)
    assert isinstance(caught.value, ResourceExhaustedError)
    assert caught.value.reason == "MESSAGE_TOO_LARGE"


@BOTH_CLIENTS
def test_a_response_that_is_too_large_names_both_settings(call: Call):
    options = {"grpc.max_receive_message_length": 100_000}
    expected = r"the response is .* bytes; the client allows 100000"
    with running(Service()) as target, pytest.raises(MessageTooLargeError, match=expected):
        call(target, LARGE, channel_options=options)


@BOTH_CLIENTS
def test_a_request_that_is_too_large_for_the_server_names_both_settings(call: Call):
    limited = running(Service(), options=[("grpc.max_receive_message_length", 1000)])
    expected = r"the request is .* bytes; the server allows 1000"
    with limited as target, pytest.raises(MessageTooLargeError, match=expected):
        call(target, LARGE)


@BOTH_CLIENTS
@pytest.mark.parametrize("compression", ["gzip", "deflate"])
def test_compressed_requests_are_understood(call: Call, compression: str):
    with running(Service()) as target:
        np.testing.assert_array_equal(call(target, LARGE, compression=compression).context_vectors, LARGE)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory):
    """A self-signed certificate for localhost: (key, certificate) as PEM."""
    folder: Path = tmp_path_factory.mktemp("tls")
    command = "openssl req -x509 -nodes -days 2 -subj /CN=localhost -newkey ec -pkeyopt"
    files = [
        "-addext",
        "subjectAltName=DNS:localhost",
        "-keyout",
        folder / "key",
        "-out",
        folder / "certificate",
    ]
    subprocess.run(
        [*command.split(), "ec_paramgen_curve:prime256v1", *files],
        check=True,
        capture_output=True,
        timeout=60,
    )
    return (folder / "key").read_bytes(), (folder / "certificate").read_bytes()


@BOTH_CLIENTS
@pytest.mark.parametrize("several", [False, True], ids=["one-target", "several-targets"])
def test_an_encrypted_connection_carries_the_token(
    call: Call, several: bool, certificate: tuple[bytes, bytes]
):
    service = Service()
    credentials = grpc.ssl_channel_credentials(certificate[1])
    with running(service, credentials=grpc.ssl_server_credentials([certificate])) as target:
        name = target.replace("127.0.0.1", "localhost")
        call([name, target] if several else name, credentials=credentials, token=TOKEN)
    assert service.attempts[0]["authorization"] == "Bearer secret"


def ready_sync(target: Any, *, timeout: float | None = None, **options: Any):
    with AttentionClient(target, **options) as client:
        client.wait_until_ready(timeout)


def ready_async(target: Any, *, timeout: float | None = None, **options: Any):
    async def ask() -> None:
        async with AsyncAttentionClient(target, **options) as client:
            await client.wait_until_ready(timeout)

    asyncio.run(ask())


CALLS_AND_WAITS = pytest.mark.parametrize(
    "call", [attend_sync, attend_async, stream_sync, stream_async, ready_sync, ready_async]
)


@CALLS_AND_WAITS
def test_a_plain_client_of_an_encrypted_server_is_told_of_credentials(
    call: Call, certificate: tuple[bytes, bytes]
):
    with (
        running(Service(), credentials=grpc.ssl_server_credentials([certificate])) as target,
        pytest.raises(AttentionClientError, match=r"pass credentials=TlsFiles.*\(--tls or --ca FILE\)$"),
    ):
        call(target, timeout=0.5)


@CALLS_AND_WAITS
def test_an_encrypted_client_of_a_plain_server_is_told_to_leave_credentials_out(call: Call):
    with (
        running(Service()) as target,
        pytest.raises(AttentionClientError, match=r"the server does not use TLS: omit credentials"),
    ):
        call(target, timeout=0.5, credentials=TlsFiles())


@EVERY_CALL
def test_a_server_that_is_down_says_nothing_of_credentials(call: Call):
    with pytest.raises(UnavailableError) as caught:
        call("127.0.0.1:1", timeout=0.3)
    assert "TLS" not in caught.value.message


@EVERY_CALL
@pytest.mark.parametrize("token", [None, TOKEN], ids=["without-token", "wrong-token"])
def test_a_client_without_a_token_is_told_how_to_pass_one(call: Call, token: str | None):
    refusing = Service(lambda context: context.abort(grpc.StatusCode.UNAUTHENTICATED, "a token is required"))
    with running(refusing) as target, pytest.raises(UnauthenticatedError) as caught:
        call(target, token=token)
    hint = "; pass token= to the client (--token or ATTENTION_TOKEN on the command line)"
    assert str(caught.value) == caught.value.message == f"a token is required{'' if token else hint}"


@pytest.mark.parametrize("version", [3, "3", np.int64(3)], ids=["int", "str", "numpy"])
def test_a_version_is_an_integer_or_a_str(version: Any):
    with running(Service()) as target, AttentionClient(target) as client:
        assert client.attend("m", QUERY, version=version).model_version == "3"
        assert client.model("m", version).version == "3"
        assert next(client.attend_stream("m", [QUERY], version=version)).model_version == "3"


@pytest.mark.parametrize("version", [0, -1, True, 1.0, None])
def test_another_version_is_refused(version: Any):
    with AttentionClient("127.0.0.1:1") as client:
        for call in (
            lambda: client.attend("m", QUERY, version=version),
            lambda: client.model("m", version),
            lambda: client.attend_stream("m", [QUERY], version=version),
        ):
            with pytest.raises(InvalidArgumentError, match="version: expected"):
                call()


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(lambda client: client.attend(5, QUERY), id="model-number"),
        pytest.param(lambda client: client.attend("\ud800", QUERY), id="model-surrogate"),
        pytest.param(lambda client: client.attend_text("m", "\ud800"), id="text-surrogate"),
        pytest.param(lambda client: client.model(None), id="no-model"),
        pytest.param(lambda client: client.model("\ud800"), id="name-surrogate"),
        pytest.param(lambda client: client.attend("m", QUERY, timeout="1"), id="timeout-text"),
        pytest.param(lambda client: client.attend_stream("m", 3), id="requests-not-iterable"),
        pytest.param(lambda client: client.attend_stream("m", [], max_in_flight=0), id="none-in-flight"),
        pytest.param(lambda client: client.attend_stream("m", [], max_in_flight=1.5), id="half-in-flight"),
        pytest.param(lambda client: client.is_ready(timeout=-1), id="negative-timeout"),
        pytest.param(lambda client: client.wait_until_ready(0), id="no-time"),
    ],
)
def test_every_wrong_argument_is_an_error_of_the_client(call: Callable[[AttentionClient], Any]):
    with AttentionClient("127.0.0.1:1") as client, pytest.raises(InvalidArgumentError):
        call(client)


def test_readiness_is_asked_once():
    with running(Service()) as target, AttentionClient(target) as client:
        assert client.is_ready()
    with AttentionClient("127.0.0.1:1") as client, pytest.raises(UnavailableError):
        client.is_ready(timeout=5)

"""How often rows are put again: once for many calls, and until several servers have them."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import grpc
import numpy as np
import pytest
from google.rpc import status_pb2
from google.rpc.error_details_pb2 import ErrorInfo
from grpc_server import Service, running
from grpc_status import rpc_status

from attention_client import AttentionClient, InvalidArgumentError
from attention_client._calls.contexts import read_rows
from attention_client._generated.attention.v1 import attention_pb2 as pb

ROWS = np.ones((2, 3), np.float32)


class Contexts(Service):
    """Knows its context once it was put.

    Attributes:
        puts: How often it was put.
        stored: Whether it is known.
    """

    puts, stored = 0, False

    def PutContext(self, request: pb.PutContextRequest, context: grpc.ServicerContext) -> Any:  # noqa: ARG002, N802
        self.puts += 1
        self.stored = True
        return pb.PutContextResponse(context=pb.Context(id="c", model_name=request.model_name))

    def ListContexts(self, request: pb.ListContextsRequest, context: grpc.ServicerContext) -> Any:  # noqa: ARG002, N802
        first = not request.page_token
        stored = [pb.Context(id="a"), pb.Context(id="b")] if first else [pb.Context(id="c")]
        return pb.ListContextsResponse(contexts=stored, next_page_token=str(7) if first else "")

    def Attend(self, request: pb.AttendRequest, context: grpc.ServicerContext) -> Any:  # noqa: N802
        if not self.stored:
            status = status_pb2.Status(code=5, message="lost")
            status.details.add().Pack(ErrorInfo(reason="CONTEXT_NOT_FOUND", domain="attention.v1"))
            context.abort_with_status(rpc_status.to_status(status))
        return super().Attend(request, context)


@contextmanager
def client_of(*services: Contexts) -> Iterator[AttentionClient]:
    with ExitStack() as stack:
        targets = [stack.enter_context(running(service)) for service in services]
        yield stack.enter_context(AttentionClient(targets))


def test_many_calls_that_miss_a_context_put_it_once():
    service = Contexts()
    with client_of(service) as client, ThreadPoolExecutor(8) as threads:
        memory = client.context("m", ROWS)
        service.stored = False
        calls = [threads.submit(client.attend, "m", ROWS, context=memory) for _ in range(32)]
        assert all((call.result().context_vectors == ROWS).all() for call in calls)
        with pytest.raises(InvalidArgumentError, match="expected a Context of model other"):
            client.attend("other", ROWS, context=memory)
    assert service.puts == 2


def test_contexts_of_all_pages_are_listed():
    with client_of(Contexts()) as client:
        assert [context.id for context in client.contexts("m")] == ["a", "b", "c"]


@pytest.mark.parametrize("count", [2, 3, 5])
def test_calls_to_several_servers_find_the_context_or_put_it(count: int):
    services = [Contexts() for _ in range(count)]
    with client_of(*services) as client:
        memory = client.context("m", ROWS)
        for _ in range(6 * count):
            client.attend("m", ROWS, context=memory)
    assert sum(len(service.requests) for service in services) == 6 * count


@pytest.mark.parametrize(
    ("field", "rows"),
    [
        ("key", ([ROWS], None, None)),
        ("value", (ROWS, [ROWS], None)),
        ("mask", (ROWS, None, np.ones(3, bool))),
    ],
)
def test_rows_are_one_sequence_with_one_mask(field: str, rows: Any):
    with pytest.raises(InvalidArgumentError) as error:
        read_rows(*rows)
    assert error.value.field == field

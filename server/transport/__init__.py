"""How calls reach the server: one interface (`call`) and two adapters.

`completion_queue` is the fast adapter, with one thread, and the only file of the server that uses grpcio's
internal API. `threaded` has a thread for each call, and uses grpcio's public API only, so that a new grpcio
can be adopted at once, whatever it changed internally.
"""

from collections.abc import Mapping

from attention_serving.server.settings import TransportKind
from attention_serving.server.transport.call import Transport


def create_transport(
    kind: TransportKind, options: Mapping[str, int], max_calls: int, send_timeout_seconds: float = 0
) -> Transport:
    """Creates a transport that is neither bound nor started.

    Each adapter is imported only if it is chosen: the internal API that one of them needs may be missing
    in a newer grpcio.

    Args:
        kind: The adapter.
        options: Channel arguments of gRPC's core.
        max_calls: Number of calls that the server holds at a time, health and reflection excepted.
        send_timeout_seconds: How long what is sent may wait for the caller to read it. 0 sets no limit.
    """
    if kind == "threaded":
        from attention_serving.server.transport.threaded import ThreadedTransport  # noqa: PLC0415

        return ThreadedTransport(options, max_calls, send_timeout_seconds)
    from attention_serving.server.transport.completion_queue import CompletionQueueTransport  # noqa: PLC0415

    return CompletionQueueTransport(options, send_timeout_seconds)

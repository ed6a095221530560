"""The gRPC server: its address, its limits, and its life from `bind` over `start` to `stop`."""

import time
from dataclasses import dataclass

from server.engine.engine import Engine
from server.errors import BindError
from server.rpc.dispatcher import CallLoad, CallObserver, Dispatcher
from server.rpc.health import HealthService
from server.rpc.routes import SERVICES, route_table
from server.rpc.transport import TransportKind, create_transport


@dataclass(frozen=True, kw_only=True)
class RpcOptions:
    """Where the server listens, and how much it takes.

    Attributes:
        host: Address to listen on; IPv6 with or without brackets.
        port: Port to listen on; 0 lets the operating system choose.
        max_message_bytes: Largest message, received or sent.
        max_concurrent_calls: Calls that are open at a time; more are refused with RESOURCE_EXHAUSTED.
        max_streams: Streams among them.
        stream_window: Requests of one stream that may be without a sent reply; no more are received.
        share_port: Whether other processes may listen on the same port and share its connections.
        transport: How calls are received.
    """

    host: str
    port: int
    max_message_bytes: int
    max_concurrent_calls: int
    max_streams: int
    stream_window: int
    share_port: bool = False
    transport: TransportKind = TransportKind.COMPLETION_QUEUE


class RpcServer:
    """The gRPC server, from `bind` over `start` to `stop`.

    `bind` needs no engine, so that a port that is in use is found before models are loaded. Connections
    that clients make between `bind` and `start` wait in the operating system's queue, and so do their
    calls, until `start` or their deadlines. They fail with UNAVAILABLE or CANCELLED if the server stops
    without having started.
    """

    def __init__(self, options: RpcOptions, observer: CallObserver) -> None:
        """Creates a server that is not bound.

        Args:
            options: Where it listens, and how much it takes.
            observer: Receives a report of every call that ended.
        """
        self._options = options
        self._observer = observer
        self._health = HealthService(SERVICES)
        self._serving = False
        self._dispatcher: Dispatcher | None = None
        channel_options = {
            "grpc.max_receive_message_length": options.max_message_bytes,
            "grpc.max_send_message_length": options.max_message_bytes,
            # A second server on the port by mistake is an error; it must not take a share of the calls.
            "grpc.so_reuseport": int(options.share_port),
        }
        self._transport = create_transport(options.transport, channel_options, options.max_concurrent_calls)

    def bind(self) -> int:
        """Binds the address. Returns the port, which the operating system chooses for port 0.

        Raises:
            BindError: The address is in use, or does not belong to this machine.
        """
        host = self._options.host.strip("[]")
        address = f"[{host}]:{self._options.port}" if ":" in host else f"{host}:{self._options.port}"
        try:
            return self._transport.listen(address)
        except RuntimeError as error:
            raise BindError(f"cannot listen on {address}: {error}") from error

    def start(self, engine: Engine) -> None:
        """Begins to answer calls, and reports health SERVING. `bind` comes first.

        Args:
            engine: Computes what calls ask for. Its owner closes it after `stop`.
        """
        self._dispatcher = dispatcher = Dispatcher(
            route_table(engine, self._health, self._is_serving),
            self._observer,
            max_calls=self._options.max_concurrent_calls,
            max_streams=self._options.max_streams,
            stream_window=self._options.stream_window,
        )
        # First: health checks that have waited for the start are answered at once.
        self._set_serving(serving=True)
        self._transport.start(dispatcher.accept, engine.run_inline)

    def stop(self, grace: float) -> float:
        """Reports NOT_SERVING, refuses new calls and waits for those that are open.

        May be called before `start`, before `bind`, and more than once.

        Args:
            grace: Seconds that the calls may take; those that are left then are cancelled.

        Returns:
            Seconds that the calls took.
        """
        started = time.monotonic()
        self._set_serving(serving=False)
        self._transport.stop(grace)
        return time.monotonic() - started

    def load(self) -> CallLoad:
        """The calls that are open now. For any thread."""
        return self._dispatcher.load() if self._dispatcher else CallLoad()

    def _is_serving(self) -> bool:
        return self._serving

    def _set_serving(self, *, serving: bool) -> None:
        self._serving = serving
        self._health.set_serving(serving=serving)

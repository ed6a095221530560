"""The HTTP endpoint for Prometheus."""

from prometheus_client import CollectorRegistry, start_http_server

from server.errors import BindError


class MetricsEndpoint:
    """Serves the metrics of a registry at http://HOST:PORT/metrics until it is closed."""

    def __init__(self, registry: CollectorRegistry, host: str, port: int) -> None:
        """Starts to listen.

        Args:
            registry: The metrics.
            host: Address or host name.
            port: 0 selects a free port.

        Raises:
            BindError: The address is in use, or does not belong to this machine.
        """
        try:
            self._server, self._thread = start_http_server(port, host, registry)
        except OSError as error:
            raise BindError(f"cannot listen on {host}:{port} for metrics: {error.strerror}") from error
        self.port: int = self._server.server_port

    def close(self) -> None:
        """Stops listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

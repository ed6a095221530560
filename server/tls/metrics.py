"""Metrics of certificates: when they expire, and whether renewed ones were taken."""

from prometheus_client import CollectorRegistry, Counter, Gauge

from attention_serving.server.tls.files import Certificates


class TlsMetrics:
    """Counts reloads, and publishes when certificates expire. Without TLS, there are no values."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._reloads = Counter(
            "attention_tls_reloads",
            "Number of times that a process took changed files of certificates (ok) or could not (failed).",
            ["result"],
            registry=registry,
        )
        self._expiry = Gauge(
            "attention_tls_certificate_expiry_timestamp_seconds",
            "When a certificate in use expires, in seconds since 1970: the server's (server), or the last of"
            " the clients' authorities (client_ca); of the worker where it is earliest.",
            ["certificate"],
            registry=registry,
            multiprocess_mode="livemin",
        )

    def in_use(self, certificates: Certificates) -> None:
        """Publishes when certificates expire that are used from now on."""
        for result in ("ok", "failed"):
            self._reloads.labels(result)
        self._expiry.labels("server").set(certificates.expires.timestamp())
        if certificates.client_ca_expires is not None:
            self._expiry.labels("client_ca").set(certificates.client_ca_expires.timestamp())

    def reloaded(self, *, success: bool) -> None:
        """Counts a change of the files."""
        self._reloads.labels("ok" if success else "failed").inc()

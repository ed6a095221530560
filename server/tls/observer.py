"""What learns which certificates are in use."""

from typing import Protocol

from attention_serving.server.tls.files import Certificates


class ReloadObserver(Protocol):
    """Learns which certificates are in use."""

    def in_use(self, certificates: Certificates) -> None:
        """Called with the first certificates, and with each that replace them."""

    def reloaded(self, *, success: bool) -> None:
        """Called when files have changed: they were taken, or they cannot be used."""


class Unobserved:
    """Ignores everything."""

    def in_use(self, certificates: Certificates) -> None:
        """Does nothing."""

    def reloaded(self, *, success: bool) -> None:
        """Does nothing."""

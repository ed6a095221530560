"""Certificates and connections as gRPC takes them. grpcio's public API only."""

from typing import Any

import grpc

from attention_serving.server.tls.files import Certificates, CurrentCertificates


def tls_credentials(current: CurrentCertificates) -> grpc.ServerCredentials:
    """Credentials of one listening address, whose handshakes use the certificates of that moment.

    Whether clients need a certificate is decided once, because it does not change.
    """
    used = current()

    def renewed() -> Any:
        """None if nothing has changed. The core calls this before each handshake, on threads of its own."""
        nonlocal used
        latest = current()
        if latest is used:
            return None
        used = latest
        return _configuration(latest)

    return grpc.dynamic_ssl_server_credentials(
        _configuration(used), renewed, require_client_authentication=used.client_ca is not None
    )


def private_credentials() -> grpc.ServerCredentials:
    """Credentials of a Unix domain socket that only processes of the same user can connect to."""
    return grpc.local_server_credentials(grpc.LocalConnectionType.UDS)


def _configuration(certificates: Certificates) -> grpc.ServerCertificateConfiguration:
    pair = certificates.contents.key, certificates.contents.certificate
    return grpc.ssl_server_certificate_configuration([pair], certificates.client_ca)

"""Certificates for Python's ssl module, as HTTP and metrics use it."""

import os
import ssl
from collections.abc import Iterator
from contextlib import contextmanager

from attention_serving.server.tls.files import CurrentCertificates


def server_context(certificate: bytes, key: bytes, client_ca: bytes | None) -> ssl.SSLContext:
    """A context of connections that clients make.

    Args:
        certificate: The server's certificate and those of the authorities between it and the root, in PEM.
        key: Its private key in PEM.
        client_ca: Authorities in PEM; each client must then show a certificate of theirs, and use TLS 1.3.

    Raises:
        ssl.SSLError: OpenSSL does not take them.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    # A resumed session would bypass the check of the client's certificate by renewed authorities. With
    # TLS 1.3, sessions can be resumed by tickets only.
    context.minimum_version = ssl.TLSVersion.TLSv1_2 if client_ca is None else ssl.TLSVersion.TLSv1_3
    context.options |= ssl.OP_NO_TICKET | ssl.OP_NO_RENEGOTIATION
    context.num_tickets = 0
    with _in_memory(certificate + b"\n" + key) as path:
        context.load_cert_chain(path)
    if client_ca is not None:
        context.load_verify_locations(cadata=client_ca.decode("ascii"))
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def renewing_context(current: CurrentCertificates) -> ssl.SSLContext:
    """A context that a listener keeps for good, and whose handshakes use the current certificates.

    To load a renewed certificate into a context in use is not enough: its authorities can only be added to,
    and a pair that turns out to be broken is half loaded by then.

    Args:
        current: Gives the certificates of the next handshake.
    """
    first = current()
    context = server_context(first.contents.certificate, first.contents.key, first.client_ca)

    def choose(connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
        connection.context = current().context

    # Called in every handshake, whether or not the client names a server.
    context.sni_callback = choose
    return context


@contextmanager
def _in_memory(content: bytes) -> Iterator[str]:
    """A file that only this process can open: the ssl module takes certificates from files only."""
    descriptor = os.memfd_create("certificate", os.MFD_CLOEXEC)
    try:
        with open(descriptor, "wb", closefd=False) as file:
            file.write(content)
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)

"""TLS of the three faces: gRPC, HTTP and metrics. Here: the certificates that a process uses.

files.py         the files of certificates; refuses a public address without TLS
certificates.py  checks what was read; contexts for Python's ssl module
"""

import ssl
from functools import partial

from attention_serving.server.threads import Reloaded, Watched, unreported
from attention_serving.server.tls.files import (
    CERTIFICATES,
    Certificates,
    Contents,
    CurrentCertificates,
    TlsFiles,
)


def watch(files: TlsFiles, reloaded: Reloaded = unreported) -> Watched[Contents, Certificates]:
    """The certificates of files, which are followed from `start` on.

    Raises:
        ServerError: The files cannot be used.
    """
    from attention_serving.server.tls.certificates import check  # noqa: PLC0415 - its library is needed with TLS only

    return Watched(CERTIFICATES, files.read, partial(check, files), reloaded)


def current_certificates(
    files: TlsFiles | None, reloaded: Reloaded = unreported
) -> CurrentCertificates | None:
    """Follows files until the process ends; returns what gives the current certificates; None without TLS.

    Raises:
        ServerError: The files cannot be used.
    """
    if files is None:
        return None
    watched = watch(files, reloaded)
    watched.start()
    return watched.current


def renewing_context(current: CurrentCertificates) -> ssl.SSLContext:
    """A context that a listener keeps for good, and whose handshakes use the current certificates.

    To load a renewed certificate into a context in use is not enough: its authorities can only be added to,
    and a pair that turns out to be broken is half loaded by then.
    """
    from attention_serving.server.tls.certificates import server_context  # noqa: PLC0415 - as above

    context = server_context(current().contents, current().client_ca)

    def choose(connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
        connection.context = current().context

    # Called in every handshake, whether or not the client names a server.
    context.sni_callback = choose
    return context

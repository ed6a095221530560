"""TLS of the three faces: gRPC, HTTP and metrics. Here: the certificates that a process uses.

files.py         the paths of certificates, and what was read from them; refuses a public address without TLS
certificates.py  checks what was read; contexts for Python's ssl module
identities.py    the names in a client's certificate, and how the HTTP process passes them on
"""

from functools import partial
from typing import Protocol, TypeAlias

from attention_serving.server.tls.files import Certificates, Contents, CurrentCertificates, TlsFiles
from attention_serving.server.watched import Watched

WatchedCertificates: TypeAlias = Watched[Contents, Certificates]


class CertificateObserver(Protocol):
    """Learns which certificates are in use."""

    def in_use(self, certificates: Certificates) -> None:
        """Called with the first certificates."""

    def renewed(self, certificates: Certificates | None) -> None:
        """Called when files have changed, with those that replace the others; None if they cannot be used."""


def watch(files: TlsFiles, observer: CertificateObserver | None = None) -> WatchedCertificates:
    """The certificates of files, which are followed from `start` on.

    Args:
        files: The files.
        observer: Learns of each change.

    Raises:
        TlsError: The files cannot be used.
    """
    from attention_serving.server.tls.certificates import check  # noqa: PLC0415 - its library is needed with TLS only

    renewed = None if observer is None else observer.renewed
    watched = Watched("certificates", files.read, partial(check, files), renewed)
    if observer is not None:
        observer.in_use(watched.value)
    return watched


def current_certificates(
    files: TlsFiles | None, observer: CertificateObserver | None = None
) -> CurrentCertificates | None:
    """Follows files until the process ends; returns what gives the current certificates; None without TLS.

    Raises:
        TlsError: The files cannot be used.
    """
    if files is None:
        return None
    watched = watch(files, observer)
    watched.start()
    return watched.current

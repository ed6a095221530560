"""Where a process gets its certificates from."""

from attention_serving.server.tls.files import CurrentCertificates, TlsFiles
from attention_serving.server.tls.observer import ReloadObserver


def current_certificates(
    files: TlsFiles | None, observer: ReloadObserver | None = None
) -> CurrentCertificates | None:
    """Watches files until the process ends; returns what gives the current certificates.

    Args:
        files: The files; None without TLS, for which None is returned.
        observer: Learns of each change.

    Raises:
        TlsError: The files cannot be used.
    """
    if files is None:
        return None
    from attention_serving.server.tls.reload import CertificateReloader  # noqa: PLC0415 - its library is needed with TLS only

    reloader = CertificateReloader(files, observer)
    reloader.start()
    return reloader.current

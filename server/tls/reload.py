"""Takes renewed certificates while the server runs."""

import logging

from attention_serving.server.errors import TlsError
from attention_serving.server.periodic import PeriodicThread
from attention_serving.server.tls.certificates import check, load
from attention_serving.server.tls.files import Certificates, TlsFiles
from attention_serving.server.tls.observer import ReloadObserver, Unobserved

log = logging.getLogger(__name__)

# How often the files are read.
CHECK_SECONDS = 2.0


class CertificateReloader:
    """Reads the files every few seconds, on a thread of its own, and replaces the certificates.

    Contents are compared, not times: a certificate is often renewed by a change of symbolic links. Files that
    cannot be used change nothing. They are reported if they stay as they are until the next look: until then
    they may be half written, or the key of a pair may follow.
    """

    def __init__(self, files: TlsFiles, observer: ReloadObserver | None = None) -> None:
        """Reads the files for the first time. The thread starts with `start`.

        Args:
            files: What is read.
            observer: Learns of each change.

        Raises:
            TlsError: The files cannot be used.
        """
        self._files = files
        self._observer = observer or Unobserved()
        self._current = load(files)
        # What could not be used at the last look, and whether that was reported.
        self._refused: object = None
        self._is_reported = False
        self._thread = PeriodicThread("certificates", self.look, CHECK_SECONDS)
        self._observer.in_use(self._current)

    def current(self) -> Certificates:
        """The certificates of the next handshake. For any thread."""
        return self._current

    def start(self) -> None:
        """Starts to watch the files."""
        self._thread.start()

    def close(self) -> None:
        """Ends the thread. Does nothing if it was not started."""
        self._thread.close()

    def look(self) -> None:
        """Reads the files once, and takes them if they have changed and can be used."""
        seen: object = None
        try:
            seen = contents = self._files.read()
            if contents == self._current.contents:
                self._refused = None
                return
            found = check(self._files, contents)
        except TlsError as error:
            self._refuse(seen or str(error), error)
            return
        self._current, self._refused = found, None
        log.info("certificate renewed", extra={"expires": f"{found.expires:%FT%TZ}"})
        self._observer.in_use(found)
        self._observer.reloaded(success=True)

    def _refuse(self, seen: object, error: TlsError) -> None:
        if seen != self._refused:
            self._refused, self._is_reported = seen, False
        elif not self._is_reported:
            self._is_reported = True
            fields = {"reason": str(error), "expires": f"{self._current.expires:%FT%TZ}"}
            log.warning("certificate not renewed; the one in use is kept", extra=fields)
            self._observer.reloaded(success=False)

"""Errors of an enrichment job."""


class EnrichError(Exception):
    """The job cannot start or cannot continue. The message says why and what to do."""


class ServersUnavailableError(EnrichError):
    """No server answered for long enough. The same job may succeed later, and continues with `resume`."""


class RefusedError(Exception):
    """The model refuses these rows and would refuse them again; other rows may pass.

    Attributes:
        reason: Short and stable, for programs, such as "LIMIT_EXCEEDED".
    """

    def __init__(self, message: str, reason: str = "") -> None:
        super().__init__(message)
        self.reason = reason

"""Why a job ends without a result."""


class EnrichError(Exception):
    """The job cannot be done, or not any further: the message says why, for people."""


class RefusedError(Exception):
    """The model refuses these rows and will refuse them again; others may pass.

    Attributes:
        reason: Short and stable, for programs, such as "LIMIT_EXCEEDED".
    """

    def __init__(self, message: str, reason: str = "") -> None:
        super().__init__(message)
        self.reason = reason

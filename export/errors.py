"""Why an export fails.

ExportError                  a module cannot be exported
├── ArtifactExistsError      the repository holds another artifact of that name and version
└── ParityError              a graph differs from eager PyTorch by more than its tolerance

Arguments that do not fit each other raise ValueError, of which ExportError is a kind.
"""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager


class ExportError(ValueError):
    """A module cannot be exported.

    Attributes:
        details: What PyTorch or ONNX Runtime raised, with its traceback, which can have thousands of lines;
            empty if the message says it all.
    """

    def __init__(self, message: str, details: str = "") -> None:
        super().__init__(message)
        self.details = details

    def with_advice(self, advice: str) -> "ExportError":
        """This error with advice after its message."""
        return ExportError(f"{self}{advice}", self.details)


class ArtifactExistsError(ExportError):
    """The repository holds another artifact of that name and version."""


class ParityError(ExportError):
    """An exported graph differs from eager PyTorch by more than its tolerance."""


def first_line(error: BaseException) -> str:
    """The type of an error and the first line of its message."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


@contextmanager
def details_in_file() -> Iterator[None]:
    """Ends an ExportError of the block with the name of a file that has its details, and without its causes.

    They stay reachable as `__context__`. Errors of probes that succeed in another way leave no file.
    """
    try:
        yield
    except ExportError as error:
        if error.details:
            with tempfile.NamedTemporaryFile(
                "w", prefix="attention-export-", suffix=".log", delete=False, encoding="utf-8"
            ) as file:
                file.write(error.details)
            error.args = (f"{error}\n  details: {file.name}",)
        raise error from None

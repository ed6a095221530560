"""Why an export fails.

ExportError                  a module cannot be exported
├── ArtifactExistsError      the repository holds another artifact of that name and version
└── ParityError              a graph differs from eager PyTorch by more than its tolerance

Arguments that do not fit each other raise ValueError, of which ExportError is a kind.
"""

import tempfile

DETAILS = "\n  details: "


class ExportError(ValueError):
    """A module cannot be exported."""

    @classmethod
    def with_details(cls, message: str, details: str) -> "ExportError":
        """An error whose details, which can have thousands of lines, are in a file that the message names."""
        with tempfile.NamedTemporaryFile(
            "w", prefix="attention-export-", suffix=".log", delete=False, encoding="utf-8"
        ) as file:
            file.write(details)
        return cls(f"{message}{DETAILS}{file.name}")

    def with_advice(self, advice: str) -> "ExportError":
        """This error with advice after its message."""
        message, details, file = str(self).partition(DETAILS)
        return ExportError(f"{message}{advice}{details}{file}")


class ArtifactExistsError(ExportError):
    """The repository holds another artifact of that name and version."""


class ParityError(ExportError):
    """An exported graph differs from eager PyTorch by more than its tolerance."""

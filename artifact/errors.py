"""The error of a damaged artifact."""

from pathlib import Path


class ArtifactError(Exception):
    """An artifact is damaged, cannot be read or cannot be run.

    The message, for the log and the console, names the path and gives all details. Callers of a server get
    the reason only.

    Attributes:
        path: The file at fault.
        reason: The name of the file and what is wrong with it, without the path and without texts of other
            libraries, which may contain paths.
    """

    def __init__(self, path: Path, what: str, *, details: object = "") -> None:
        """Describes the error.

        Args:
            path: The file at fault.
            what: What is wrong with it, without a path.
            details: The text of another library, for the message only.
        """
        text = f"{what}: {details}" if details else what
        super().__init__(f"{path}: {text}")
        self.path = path
        self.reason = f"{path.name}: {what}"

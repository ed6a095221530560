"""Why an export fails.

ExportError                  a module cannot be exported
├── ArtifactExistsError      the repository holds another artifact of that name and version
└── ParityError              a graph differs from eager PyTorch by more than its tolerance

Arguments that do not fit each other raise ValueError.
"""


class ExportError(Exception):
    """A module cannot be exported."""


class ArtifactExistsError(ExportError):
    """The repository holds another artifact of that name and version."""


class ParityError(ExportError):
    """An exported graph differs from eager PyTorch by more than its tolerance."""

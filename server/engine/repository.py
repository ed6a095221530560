"""The models of a repository, including those that failed to load and why."""

import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from artifact.errors import ArtifactError
from server.engine.calibration import calibrated
from server.engine.errors import ModelNotFoundError, ModelNotReadyError
from server.engine.limits import MAX_TOLERANCE
from server.engine.loading import load_model
from server.engine.model import LoadedModel
from server.engine.provider import Device, ProviderError

log = logging.getLogger(__name__)


class RepositoryError(Exception):
    """The model repository cannot be read."""


@dataclass(frozen=True)
class FailedModel:
    """A model of the repository that failed to load.

    Attributes:
        reason: Why, for callers: it contains no path of this machine. The log has the details.
    """

    name: str
    version: str
    reason: str


Model = LoadedModel | FailedModel


class Repository:
    """Models by name and version."""

    def __init__(self, models: list[Model]) -> None:
        self._models = {(model.name, model.version): model for model in models}
        self._newest: dict[str, Model] = {}
        # The highest version that loaded; if none did, the highest version.
        for model in sorted(models, key=lambda m: (isinstance(m, LoadedModel), int(m.version))):
            self._newest[model.name] = model

    def __iter__(self) -> Iterator[Model]:
        """Every model, sorted by name and version."""
        return iter(self._models[key] for key in sorted(self._models, key=lambda key: (key[0], int(key[1]))))

    def find(self, name: str, version: str = "") -> Model:
        """A model in any state: the given version, or the highest one that loaded.

        Raises:
            ModelNotFoundError: The model or version does not exist.
        """
        if name not in self._newest:
            known = ", ".join(sorted(self._newest)) or "none"
            raise ModelNotFoundError(f"model {name!r} does not exist; there are: {known}", field="model_name")
        found = self._models.get((name, version)) if version else self._newest[name]
        if found is None:
            versions = ", ".join(model.version for model in self if model.name == name)
            raise ModelNotFoundError(
                f"model {name!r} does not have version {version!r}; it has: {versions}", field="model_version"
            )
        return found

    def ready(self, name: str, version: str = "") -> LoadedModel:
        """A loaded model.

        Raises:
            ModelNotFoundError: The model or version does not exist.
            ModelNotReadyError: The model failed to load.
        """
        model = self.find(name, version)
        if isinstance(model, FailedModel):
            raise ModelNotReadyError(f"model {name!r} version {model.version} failed to load: {model.reason}")
        return model


def load_repository(folder: Path, device: Device, *, max_tolerance: float = MAX_TOLERANCE) -> Repository:
    """Loads every artifact of a folder. A damaged artifact affects only its own model.

    Args:
        folder: The repository.
        device: Where graphs run.
        max_tolerance: Upper bound of the tolerances that a manifest may state, relative and absolute.

    Raises:
        RepositoryError: The folder does not exist or does not contain a model.
    """
    return Repository([_load(path, device, max_tolerance) for path in find_artifacts(folder)])


def find_artifacts(folder: Path) -> list[Path]:
    """Every `<name>/<version>/` below a folder, by name and version.

    Raises:
        RepositoryError: The folder does not exist or does not contain a model.
    """
    if not folder.is_dir():
        raise RepositoryError(f"model repository {folder} does not exist or is not a folder")
    # Model names do not begin with a dot. Kubernetes keeps the content of volumes in such folders.
    names = sorted(path.name for path in folder.iterdir() if path.is_dir() and path.name[0] != ".")
    artifacts = [folder / name / version for name in names for version in versions(folder, name)]
    if not artifacts:
        raise RepositoryError(f"model repository {folder} does not contain a <name>/<version>/ folder")
    return artifacts


def versions(repository: Path, name: str) -> list[str]:
    """The versions of a model on disk, lowest first; empty if the model does not exist."""
    folders = (repository / name).glob("*")
    found = [path.name for path in folders if path.is_dir() and re.fullmatch(r"[1-9][0-9]*", path.name)]
    return sorted(found, key=int)


def _load(path: Path, device: Device, max_tolerance: float) -> Model:
    name, version = path.parent.name, path.name
    try:
        model = calibrated(load_model(path, device, max_tolerance=max_tolerance))
    except (ArtifactError, ProviderError) as error:
        log.error("model failed to load", extra={"model": name, "version": version, "reason": str(error)})
        return FailedModel(name, version, error.reason if isinstance(error, ArtifactError) else str(error))
    except Exception as error:  # one model must not keep the others from being served
        log.exception("model failed to load", extra={"model": name, "version": version, "path": str(path)})
        return FailedModel(name, version, f"unexpected {type(error).__name__}; the server's log has details")
    log.info(
        "model ready",
        extra={
            "model": name,
            "version": version,
            "provider": model.provider,
            "parity_max_abs_error": float(f"{model.measured_error:.3g}"),
        },
    )
    return model

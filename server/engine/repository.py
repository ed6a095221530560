"""The models of a repository: loads all, keeps those that failed with their reason."""

import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from artifact.manifest import ArtifactError
from server.engine.calibration import calibrated
from server.engine.errors import ModelNotFoundError, ModelNotReadyError
from server.engine.model import LoadedModel, load_model
from server.engine.session import Device, ProviderError

log = logging.getLogger(__name__)


class RepositoryError(Exception):
    """The repository itself cannot be read."""


@dataclass(frozen=True)
class FailedModel:
    """A model that is in the repository and does not answer."""

    name: str
    version: str
    reason: str


Model = LoadedModel | FailedModel


class Repository:
    """Models by name and version."""

    def __init__(self, models: list[Model]) -> None:
        self._models = {(model.name, model.version): model for model in models}
        self._newest: dict[str, Model] = {}
        # The highest version, but one that answers before one that failed to load.
        for model in sorted(models, key=lambda m: (isinstance(m, LoadedModel), int(m.version))):
            self._newest[model.name] = model

    def __iter__(self) -> Iterator[Model]:
        """Every model, sorted by name and version."""
        return iter(self._models[key] for key in sorted(self._models, key=lambda key: (key[0], int(key[1]))))

    def find(self, name: str, version: str = "") -> Model:
        """A model in whatever state; the highest version that answers where none is given.

        Raises:
            ModelNotFoundError: There is no such model or version.
        """
        if name not in self._newest:
            known = ", ".join(sorted(self._newest)) or "none"
            raise ModelNotFoundError(f"model {name!r} does not exist; there are: {known}", field="model_name")
        found = self._models.get((name, version)) if version else self._newest[name]
        if found is None:
            versions = ", ".join(model.version for model in self if model.name == name)
            raise ModelNotFoundError(
                f"model {name!r} has no version {version!r}; there are: {versions}", field="model_version"
            )
        return found

    def ready(self, name: str, version: str = "") -> LoadedModel:
        """A model that answers.

        Raises:
            ModelNotFoundError: There is no such model or version.
            ModelNotReadyError: It failed to load.
        """
        model = self.find(name, version)
        if isinstance(model, FailedModel):
            raise ModelNotReadyError(f"model {name!r} version {model.version} failed to load: {model.reason}")
        return model


def load_repository(folder: Path, device: Device) -> Repository:
    """Loads every `<name>/<version>/` below a folder. A damaged artifact stops that model only.

    Raises:
        RepositoryError: The folder does not exist or holds no model.
    """
    if not folder.is_dir():
        raise RepositoryError(f"model repository {folder} is not a folder")
    artifacts = sorted(
        path for path in folder.glob("*/*") if path.is_dir() and re.fullmatch(r"[1-9][0-9]*", path.name)
    )
    if not artifacts:
        raise RepositoryError(f"model repository {folder} holds no <name>/<version>/ folder")
    return Repository([_load(path, device) for path in artifacts])


def _load(path: Path, device: Device) -> Model:
    name, version = path.parent.name, path.name
    try:
        model = calibrated(load_model(path, device))
    except (ArtifactError, ProviderError) as error:
        log.error("model failed", extra={"model": name, "version": version, "reason": str(error)})
        return FailedModel(name, version, str(error))
    except Exception as error:  # whatever is wrong with one model, the others serve
        log.exception("model failed", extra={"model": name, "version": version, "reason": repr(error)})
        return FailedModel(name, version, f"{path}: {error!r}")
    log.info(
        "model ready",
        extra={
            "model": name,
            "version": version,
            "provider": model.provider,
            "parity_max_abs_error": f"{model.measured_error:.3g}",
        },
    )
    return model

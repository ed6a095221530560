"""The model repository on disk: which artifacts it has, and how one is loaded."""

import dataclasses
import logging
import os
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from attention_serving.artifact.certificate import CERTIFICATE_FILE
from attention_serving.artifact.errors import ArtifactError
from attention_serving.artifact.golden import GoldenCase
from attention_serving.artifact.keys import PublicKey
from attention_serving.artifact.manifest import MANIFEST_FILE
from attention_serving.artifact.names import NAME_PATTERN, is_model_name, is_version
from attention_serving.server.engine.limits import MAX_TOLERANCE, chosen_versions
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.models.loading import load_model
from attention_serving.server.engine.models.repository import FailedModel, Key, Model
from attention_serving.server.engine.run.calibration import calibrated
from attention_serving.server.engine.run.provider import Device, ProviderError

log = logging.getLogger(__name__)

# Identifies the content of an artifact without reading it: name, inode, size and time of change of each file.
Signature = tuple[tuple[str, int, int, int], ...]


class RepositoryError(Exception):
    """The model repository cannot be read."""


@dataclass(frozen=True)
class ModelStore:
    """A folder of artifacts, `<name>/<version>/`.

    Attributes:
        folder: The folder.
        device: Where graphs run.
        max_tolerance: Upper bound of the tolerances that a manifest may state, relative and absolute.
        policy: Which versions are served; see `chosen_versions`.
        proof_keys: If there are any, each artifact must have a certificate that one of them verifies.
        max_golden_bytes: Expected memory of the largest golden cases that models keep, to replay them while
            they serve; 0 if they keep none.
    """

    folder: Path
    device: Device
    max_tolerance: float = MAX_TOLERANCE
    policy: str = "all"
    proof_keys: tuple[PublicKey, ...] = ()
    max_golden_bytes: int = 0

    def names(self) -> list[str]:
        """The names of all models, sorted.

        Raises:
            RepositoryError: The folder does not exist.
        """
        if not self.folder.is_dir():
            raise RepositoryError(f"model repository {self.folder} does not exist or is not a folder")
        return sorted(path.name for path in self.folder.iterdir() if versions(self.folder, path.name))

    def chosen(self, name: str) -> list[str]:
        """The versions of a model that the policy chooses, lowest first; empty if there is no such model."""
        return chosen_versions(self.policy, versions(self.folder, name))

    def artifacts(self, names: Iterable[str]) -> list[Key]:
        """Name and version of every artifact that is to be served, of some models.

        Raises:
            RepositoryError: There is none.
        """
        found = [(name, version) for name in names for version in self.chosen(name)]
        if not found:
            raise RepositoryError(
                f"model repository {self.folder} does not contain a <name>/<version>/ folder; "
                f"a name must match {NAME_PATTERN}"
            )
        return found

    def signature(self, name: str, version: str) -> Signature | None:
        """Identifies the content of an artifact; None while it has no manifest, which an export writes last.

        A certificate counts only if the artifact needs one.
        """
        unused = () if self.proof_keys else (CERTIFICATE_FILE,)
        found = _files(self.folder / name / version)
        if not any(file == MANIFEST_FILE for file, *_ in found):
            return None
        return tuple(each for each in found if each[0] not in unused)

    def load(self, name: str, version: str) -> Model:
        """Loads an artifact, proves it on its golden vectors, and measures what its runs cost."""
        path, fields = self.folder / name / version, {"model": name, "version": version}
        started = time.monotonic()
        try:
            model = self._loaded(path)
        except (ArtifactError, ProviderError) as error:
            log.error("model failed to load", extra={**fields, "reason": str(error)})
            reason = error.reason if isinstance(error, ArtifactError) else str(error)
            return FailedModel(name, version, reason)
        except Exception as error:  # one model must not keep the others from being served
            log.exception("model failed to load", extra={**fields, "path": str(path)})
            reason = f"unexpected {type(error).__name__}; the server's log has details"
            return FailedModel(name, version, reason)
        log.info(
            "model ready",
            extra={
                **fields,
                "provider": model.provider,
                "parity_max_abs_error": float(f"{model.measured_error:.3g}"),
                "seconds": round(time.monotonic() - started, 3),
            },
        )
        return model

    def _loaded(self, path: Path) -> LoadedModel:
        model = calibrated(
            load_model(
                path,
                self.device,
                max_tolerance=self.max_tolerance,
                proof_keys=self.proof_keys,
                keep_golden=self.max_golden_bytes > 0,
            )
        )
        kept = tuple(case for case in model.golden if golden_bytes(model, case) <= self.max_golden_bytes)
        if dropped := len(model.golden) - len(kept):
            fields = {"model": model.name, "version": model.version, "cases": dropped, "kept": len(kept)}
            log.warning("golden vectors too large to be replayed in service", extra=fields)
        return dataclasses.replace(model, golden=kept)


def golden_bytes(model: LoadedModel, case: GoldenCase) -> int:
    """Expected memory of the replay of a golden case, in bytes. The longest input counts for all."""
    shapes = [case.inputs[spec.name].shape for spec in model.inputs]
    batch, length = (max(shape[at] for shape in shapes) for at in (0, 1))
    return model.run_bytes(case.graph, batch, length, length)


def _files(folder: Path) -> Signature:
    """The files of a folder, sorted by name, without temporary ones, whose names begin with a dot."""
    found = []
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            with suppress(OSError):
                if entry.is_file() and entry.name[0] != ".":
                    status = entry.stat()
                    found.append((entry.name, status.st_ino, status.st_size, status.st_mtime_ns))
    return tuple(sorted(found))


def versions(repository: Path, name: str) -> list[str]:
    """The versions of a model on disk, lowest first; empty if the model does not exist.

    A name that is not that of a model, such as a path, does not exist, wherever it would lead.
    """
    if not is_model_name(name):
        return []
    folders = (repository / name).glob("*")
    return sorted((path.name for path in folders if is_version(path.name) and path.is_dir()), key=int)

"""Folders that are written whole or not at all; an artifact's is checked before its export begins."""

import fcntl
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from attention_serving.artifact.locks import lock, remove_unused
from attention_serving.artifact.manifest import Manifest, is_whole
from attention_serving.artifact.names import ModelId
from attention_serving.export.errors import ArtifactExistsError


@contextmanager
def temporary_folder(target: Path) -> Iterator[Path]:
    """A folder beside another one to write into. It is removed, unless `put_folder` has moved it.

    So are those of processes that were killed.
    """
    parent = target.parent
    parent.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        with ExitStack() as making:
            with suppress(OSError):  # without locks, nothing is removed that may be in use
                making.enter_context(lock(parent, fcntl.LOCK_EX))
                remove_unused(parent.glob(f".{target.name}.????????"))
                for retired in parent.glob(f".{target.name}.????????.retired"):
                    _restore(retired, target)
            temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=parent))
            with suppress(OSError):
                stack.enter_context(lock(temporary, fcntl.LOCK_EX))
        try:
            yield temporary
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
            with suppress(OSError):  # the folder holds this or other versions
                parent.rmdir()


def _restore(retired: Path, target: Path) -> None:
    """Puts back, or removes, what an export has left that was killed while it replaced a folder."""
    if retired.with_suffix("").exists():  # it has not ended
        return
    if target.exists():
        shutil.rmtree(retired, ignore_errors=True)
    else:
        retired.rename(target)


def put_folder(temporary: Path, target: Path) -> None:
    """Moves a folder of files to the place of another one, if there is one, for all users to read."""
    # Servers run as other users than exporters; temporary folders and some writers deny them access.
    temporary.chmod(0o755)
    for path in temporary.iterdir():
        path.chmod(0o644)
    if not target.exists():
        temporary.rename(target)
        return
    retired = temporary.with_name(temporary.name + ".retired")
    target.rename(retired)
    try:
        temporary.rename(target)
    except OSError:
        retired.rename(target)
        raise
    shutil.rmtree(retired, ignore_errors=True)


@dataclass(frozen=True, kw_only=True)
class Target:
    """A version of a model in a repository.

    Attributes:
        replace: Whether to replace a different artifact of this name and version.
    """

    repository: Path
    model: ModelId
    replace: bool = False

    @property
    def folder(self) -> Path:
        """The folder of the artifact."""
        return self.model.folder(self.repository)

    def check(self, source: str) -> None:
        """Refuses an export that cannot end well, before it begins.

        An artifact that records the same source passes: the export may turn out to be identical, and then
        succeeds without a change.

        Args:
            source: The `source_digest` of what is to be exported.

        Raises:
            ArtifactExistsError: The folder holds an artifact of another source, or a damaged one.
        """
        if self.replace or not self.folder.exists():
            return
        if not is_whole(self.folder):
            raise self._exists("a damaged artifact")
        if Manifest.load(self.folder).source != source:
            raise self._exists("another artifact")

    def put(self, temporary: Path, manifest: Manifest) -> bool:
        """Moves a written artifact into place, unless the target holds the same one.

        Returns:
            Whether it was moved.

        Raises:
            ArtifactExistsError: The target holds another artifact, and `replace` is false.
        """
        if self.folder.exists():
            if is_whole(self.folder) and _identity(Manifest.load(self.folder)) == _identity(manifest):
                return False
            if not self.replace:
                raise self._exists("another artifact")
        put_folder(temporary, self.folder)
        return True

    def _exists(self, what: str) -> ArtifactExistsError:
        free = self.model.next_free_version(self.repository)
        return ArtifactExistsError(
            f"{self.folder} holds {what}; replace it (--replace, replace=True), or choose another version: "
            f"{free} is free"
        )


def _identity(manifest: Manifest) -> Manifest:
    """The graphs, golden vectors and metadata of a model; measured errors may differ."""
    files = {name: digest for name, digest in manifest.files.items() if name != manifest.parity_report}
    return manifest.model_copy(update={"files": files, "source": ""})

"""Copies of artifacts that belong to the servers of this user: the files that sessions map while they serve.

Whatever happens to the model repository, the bytes that were verified are those that serve. A copy lies in
the folder of temporary files, under the SHA-256 of its manifest, so that all processes that serve an artifact
share its pages. Each of them holds a lock on the copy. Copies without a lock, such as those of a server that
was killed, are removed whenever a model is loaded or freed. A file beside it records crashes while it loads.
"""

import faulthandler
import fcntl
import hashlib
import os
import shutil
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from attention_serving.artifact.errors import ArtifactError
from attention_serving.artifact.locks import lock, remove_unused
from attention_serving.artifact.manifest import MANIFEST_FILE, Manifest, is_whole

# Its name begins with a dot, as that of no hash does.
INCOMPLETE = ".incomplete"
# Begins every crash in a record. An artifact with this many crashes is not loaded any more.
CRASH, MOST_CRASHES = b"Fatal Python error: ", 2


class ArtifactCopy:
    """A verified copy of an artifact, which stays while this object does.

    Attributes:
        digest: SHA-256 of the manifest, which identifies the artifact.
        folder: The copy's folder.
        close: Lets the copy go. Sessions that were opened from it keep what they have mapped.
    """

    def __init__(self, folder: Path, manifest: Manifest, content: bytes) -> None:
        """Copies an artifact, unless another process has done so, and verifies artifact and copy.

        Args:
            folder: The artifact's folder.
            manifest: Its manifest.
            content: The bytes of the manifest.

        Raises:
            ArtifactError: A file does not have its recorded hash, or cannot be copied.
        """
        try:
            copies = _copies_folder()
            self.digest = hashlib.sha256(content).hexdigest()
            self.folder = copies / self.digest
            with lock(copies, fcntl.LOCK_EX), ExitStack() as stack:
                stack.callback(lambda: remove_unused(copies.iterdir()))  # also what could not be copied
                if is_whole(self.folder):
                    manifest.verify_files(folder)
                else:
                    self._copy(folder, manifest, content)
                descriptor = os.open(self.folder, os.O_RDONLY)
                self.close = weakref.finalize(self, _release, copies, descriptor)
                fcntl.flock(descriptor, fcntl.LOCK_SH)
        except OSError as error:
            reason = f"the artifact cannot be copied to the folder of temporary files: {error.strerror}"
            problem = f"{reason}; free space there, or set TMPDIR"
            raise ArtifactError(folder / MANIFEST_FILE, problem, details=error) from error

    @contextmanager
    def record_crash(self) -> Iterator[None]:
        """Appends to a file beside the copy if a signal such as SIGSEGV ends this process in the block.

        The end of the block, by an exception too, removes the file.

        Raises:
            ArtifactError: Too many processes have ended so. Nothing has been tried.
        """
        record = self.folder.with_suffix(".crashes")
        with record.open("ab+") as file:
            file.seek(0)
            _, *crashes = file.read().split(CRASH)
            if len(crashes) >= MOST_CRASHES:
                cause = crashes[-1].decode(errors="replace").splitlines()[0]
                reason = f"{len(crashes)} processes crashed while they loaded this artifact"
                problem = f"{reason}; it is not loaded until it changes or this file is removed"
                raise ArtifactError(record, problem, details=cause)
            was_enabled = faulthandler.is_enabled()
            faulthandler.enable(file)
            try:
                yield
            finally:
                faulthandler.disable()
                if was_enabled:
                    faulthandler.enable(2)  # standard error
                record.unlink(missing_ok=True)

    def _copy(self, folder: Path, manifest: Manifest, content: bytes) -> None:
        incomplete = self.folder.with_name(INCOMPLETE)
        for path in (incomplete, self.folder):
            shutil.rmtree(path, ignore_errors=True)
        incomplete.mkdir()
        manifest.verify_files(folder, incomplete)
        (incomplete / MANIFEST_FILE).write_bytes(content)
        incomplete.rename(self.folder)


def _copies_folder() -> Path:
    """The folder of all copies, which no other user can write to.

    Raises:
        OSError: There is none.
    """
    folder = Path(tempfile.gettempdir(), f"attention-models-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if status.st_uid != os.getuid() or status.st_mode & 0o077 or folder.is_symlink():
        raise PermissionError(0, f"{folder.name} there is not a folder of this user alone")
    return folder


def _release(copies: Path, descriptor: int) -> None:
    """Gives up the lock on a copy. Does not wait for another process, which removes what is unused itself."""
    os.close(descriptor)
    with suppress(OSError), lock(copies, fcntl.LOCK_EX | fcntl.LOCK_NB):
        remove_unused(copies.iterdir())

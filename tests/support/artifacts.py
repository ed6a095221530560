"""A cache of exported models: each set of models is exported once for a state of the code that exports it."""

import hashlib
import json
import multiprocessing
import os
import platform
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock

from attention_serving.artifact.manifest import MANIFEST_FILE, file_hash, is_whole
from attention_serving.export.artifact import LIBRARIES
from scripts.local_server import ROOT

# CI may set it to a folder that it keeps between runs.
FOLDER_VARIABLE = "TEST_ARTIFACTS"
DEFAULT_FOLDER = ROOT / "build/test-artifacts"
EXPORTING_CODE = (ROOT / "model", ROOT / "export", ROOT / "artifact")
EXPORTERS = 2
# States of one set that stay in the cache: the current one, and those of other branches.
KEPT = 4
# Writes models into a model repository. It runs in another process, and two jobs run at a time.
Job = Callable[[Path], object]
# All sets of the modules that are imported.
SETS: list["ModelSet"] = []


@dataclass(frozen=True, eq=False)
class ModelSet:
    """Models that are exported together.

    Attributes:
        name: Name of the set in the cache.
        jobs: Each exports some of the models.
        sources: Files that decide what is exported, beside those of model/, export/ and artifact/.
        fixtures: Names of fixtures that need the models, which are then exported before the tests begin.
    """

    name: str
    jobs: Sequence[Job]
    sources: Sequence[Path] = ()
    fixtures: Sequence[str] = ()

    def __post_init__(self) -> None:
        SETS.append(self)

    def folder(self, cache_folder: Path) -> Path:
        """The set's model repository in the cache."""
        return cache_folder / f"{self.name}-{_digest((*EXPORTING_CODE, *self.sources))}"


def cached_repositories(*sets: ModelSet) -> list[Path]:
    """Returns a model repository for each set, after exporting the sets that the cache lacks.

    Test processes that ask for the same set at the same time export it once. Tests must not write to it.
    """
    cache_folder = Path(os.environ.get(FOLDER_VARIABLE) or DEFAULT_FOLDER)
    cache_folder.mkdir(parents=True, exist_ok=True)
    repositories = {models: models.folder(cache_folder) for models in sets}
    if not all(map(_holds_whole_artifacts, repositories.values())):
        with FileLock(cache_folder / "lock"):
            _export({m: folder for m, folder in repositories.items() if not _holds_whole_artifacts(folder)})
            for models in sets:
                _prune(cache_folder, models.name)
    for repository in repositories.values():
        os.utime(repository)
    return list(repositories.values())


def link_tree(source: Path, target: Path) -> None:
    """Fills a folder with hard links to the files of another, or copies if they are on different devices.

    Servers refuse symbolic links that lead out of their repository.
    """

    def link(file: str, copy: str) -> None:
        try:
            os.link(file, copy)
        except OSError:
            shutil.copy2(file, copy)

    shutil.copytree(source, target, copy_function=link, dirs_exist_ok=True)


def _digest(sources: Sequence[Path]) -> str:
    """A hash of the sources' contents and of the versions of Python and the libraries that export."""
    digest = hashlib.sha256(f"{platform.python_version()} {platform.machine()}\n".encode())
    for library in LIBRARIES:
        digest.update(f"{library} {metadata.version(library)}\n".encode())
    for source in sources:
        for path in sorted(source.rglob("*.py")) if source.is_dir() else [source]:
            content = hashlib.sha256(path.read_bytes()).hexdigest()
            digest.update(f"{path.relative_to(ROOT)} {content}\n".encode())
    return digest.hexdigest()[:16]


def _holds_whole_artifacts(repository: Path) -> bool:
    return repository.exists() and all(is_whole(version) for version in repository.glob("*/*"))


def _export(repositories: Mapping[ModelSet, Path]) -> None:
    """Runs the jobs of all sets, and renames each set's folder once all of them have succeeded."""
    if not repositories:
        return
    spawning = multiprocessing.get_context("spawn")
    with (
        tempfile.TemporaryDirectory(dir=next(iter(repositories.values())).parent) as temporary,
        ProcessPoolExecutor(EXPORTERS, spawning, torch.set_num_threads, (1,)) as pool,
    ):
        folders = {models: Path(temporary) / models.name for models in repositories}
        for folder in folders.values():
            folder.mkdir()
        exports = [pool.submit(job, folders[models]) for models in repositories for job in models.jobs]
        for export in exports:
            export.result()
        for models, repository in repositories.items():
            shutil.rmtree(repository, ignore_errors=True)
            folders[models].rename(repository)


def _prune(folder: Path, name: str) -> None:
    """Removes the states of a set that were not used for the longest time."""
    states = sorted(folder.glob(f"{name}-*"), key=lambda path: path.stat().st_mtime, reverse=True)
    for old in states[KEPT:]:
        shutil.rmtree(old, ignore_errors=True)


def edit_json(path: Path, change: Callable[[Any], object]) -> None:
    """Changes what a file of JSON holds."""
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def vouch(folder: Path, *files: str) -> None:
    """Makes the manifest of an artifact vouch for files as they now are."""
    hashes = {file: file_hash(folder / file) for file in files}
    edit_json(folder / MANIFEST_FILE, lambda content: content["files"].update(hashes))

"""A working copy of this repository at any commit, of which only the command line is used."""

import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from benchmarks.compute import VERSION, save_weights
from benchmarks.processes import worker
from benchmarks.workload import Model
from scripts.local_server import ROOT


@dataclass(frozen=True)
class Checkout:
    """A checkout, by its root folder. Its code runs in processes of its own."""

    root: Path = ROOT

    @property
    def python(self) -> Path:
        """The interpreter of the checkout's environment; that of this process if it has none."""
        python = self.root / ".venv/bin/python"
        return python if python.exists() else Path(sys.executable)

    def models(self, models: Iterable[Model], cache: Path) -> Path:
        """Exports models with this checkout's exporter unless present; returns their repository.

        Weights are always equal.

        Raises:
            RuntimeError: The exporter failed; the message holds its output.
        """
        weights, repository = (cache / "weights").resolve(), self.repository(cache)
        weights.mkdir(parents=True, exist_ok=True)
        missing = [m for m in models if not (repository / m.name / VERSION / "manifest.json").exists()]
        with worker() as torch_worker:
            for model in missing:
                file = torch_worker.submit(save_weights, model, weights).result()
                self._export(model, file, repository)
        return repository

    def repository(self, cache: Path) -> Path:
        """Returns the folder for models made by this checkout's exporter, by the content of its code."""
        digest = sha256()
        for package in ("artifact", "export", "model"):
            for file in sorted((self.root / package).rglob("*.py")):
                digest.update(file.relative_to(self.root).as_posix().encode() + file.read_bytes())
        return (cache / "models" / digest.hexdigest()[:12]).resolve()

    def _export(self, model: Model, weights: Path, repository: Path) -> None:
        command: list[str | Path] = [self.python, "-m", "export", "--weights", weights, "--layout", "generic"]
        command += ["--heads", str(model.heads), "--precision", model.precision.value]
        command += ["--name", model.name, "--out", repository]
        result = subprocess.run(  # noqa: S603 - a command of this repository
            command, cwd=self.root, capture_output=True, text=True, check=False
        )
        if result.returncode:
            raise RuntimeError(
                f"exporting {model.name} in {self.root} failed:\n{result.stdout}{result.stderr}"
            )

"""Packs what the kit needs on a machine without a network, in parts that are small enough to carry."""

import re
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from hashlib import sha256
from lzma import FILTER_LZMA2, LZMAFile
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.cuda.settings import Settings
from scripts.local_server import ROOT

PART_BYTES = 48 << 20
# The pinned versions of what the server needs on a GPU.
REQUIREMENTS = ROOT / "deploy/requirements/server-cuda.txt"
# What is there: PyTorch needs it, or ONNX Runtime takes what PyTorch brings along.
PRESENT = ("numpy", "nvidia-")
GLIBC = (17, 24, 26, 27, 28, 31, 34)
# Finds the matches of encoders whose layers are rotations of one another, and of graphs that share weights.
DICTIONARY_BYTES = 192 << 20
SCRIPT = """\
#!/bin/sh
# Joins the parts, unpacks them once, and starts the kit in this checkout: sh FOLDER/run.sh [OPTION...]
# With --unpack it stops after the first step. Nothing that is installed is changed.
set -e
parts=$(cd "$(dirname "$0")" && pwd)
work=${KIT_FOLDER:-/tmp/attention-kit}
python=${PYTHON:-python3}
if [ ! -e "$work/unpacked" ]; then
    mkdir -p "$work"
    (cd "$parts" && sha256sum --quiet -c SHA256SUMS)
    cat "$parts"/wheels.tar.* | tar -x -C "$work"
    cat "$parts"/cache.tar.xz.* | "$python" -c 'import sys, tarfile
tarfile.open(fileobj=sys.stdin.buffer, mode="r|xz").extractall(sys.argv[1], filter="data")' "$work"
    "$python" -m pip install -q --no-index --no-deps --no-compile --target "$work/site" "$work"/wheels/*.whl
    # ONNX Runtime looks for the libraries of CUDA beside its own folder.
    nvidia=$("$python" -c 'import nvidia; print(list(nvidia.__path__)[0])' || true)
    [ -z "$nvidia" ] || ln -sfn "$nvidia" "$work/site/nvidia"
    touch "$work/unpacked"
fi
[ "$1" != --unpack ] || exit 0
PYTHONPATH="$work/site:$PWD/clients/python/src${PYTHONPATH:+:$PYTHONPATH}"
export PYTHONPATH
exec "$python" -m benchmarks cuda --cache "$work/cache" "$@"
"""


def pack(settings: Settings, folder: Path, python: str) -> Iterator[Path]:
    """Writes wheels, artifacts, checksums and the script that starts the kit; yields each file.

    Args:
        settings: What is packed; the artifacts are there.
        folder: Where the parts are written.
        python: Version of Python there, such as 3.12.

    Raises:
        RuntimeError: A wheel cannot be downloaded.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.tar*"):
        old.unlink()
    with TemporaryDirectory(dir=folder) as name:
        wheels, archive = Path(name) / "wheels", Path(name) / "archive"
        download(wheels, python)
        with tarfile.open(archive, "w") as tar:
            tar.add(wheels, "wheels")
        parts = [*split(archive, folder / "wheels.tar")]
        filters = [{"id": FILTER_LZMA2, "preset": 1, "dict_size": DICTIONARY_BYTES}]
        with LZMAFile(archive, "w", filters=filters) as file, tarfile.open(fileobj=file, mode="w") as tar:
            for part in ("encoders", "fixed", "models"):
                tar.add(settings.cache / part, f"cache/{part}")
        parts += split(archive, folder / "cache.tar.xz")
    sums, script = folder / "SHA256SUMS", folder / "run.sh"
    sums.write_text("".join(f"{sha256(part.read_bytes()).hexdigest()}  {part.name}\n" for part in parts))
    script.write_text(SCRIPT)
    script.chmod(0o755)
    yield from (*parts, sums, script)


def download(folder: Path, python: str) -> None:
    """Downloads the pinned wheels of the server for CUDA, without those that are there."""
    pins = re.findall(r"^([a-z0-9-]+==\S+)", REQUIREMENTS.read_text(), re.MULTILINE)
    names = [pin for pin in pins if not pin.startswith(PRESENT)]
    platforms = [f"--platform=manylinux_2_{minor}_x86_64" for minor in GLIBC]
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:"]
    command += [*platforms, f"--python-version={python}", "--implementation=cp", "-d", str(folder), *names]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - names are pinned
    if ended.returncode:
        raise RuntimeError(f"the wheels cannot be downloaded: {ended.stderr.strip()[-500:]}")


def split(file: Path, target: Path) -> Iterator[Path]:
    """Writes a file in parts, `TARGET.00`, `TARGET.01` …; yields their paths."""
    with file.open("rb") as source:
        for number in range(100):
            if not (content := source.read(PART_BYTES)):
                return
            part = target.with_name(f"{target.name}.{number:02}")
            part.write_bytes(content)
            yield part
    raise RuntimeError(f"{target.name} has more than 100 parts")

"""Finds the shared libraries that programs and extension modules need, as the dynamic linker finds them."""

import re
import shutil
import subprocess
from pathlib import Path

# A line of ldd: "libz.so.1 => /lib/x86_64-linux-gnu/libz.so.1 (0x…)", "/lib64/ld-linux-x86-64.so.2 (0x…)" or
# "libcuda.so.1 => not found".
_LINE = re.compile(r"^\s+(?:(\S+) => )?(not found|/\S+)", re.MULTILINE)
# Files in one call of ldd.
_FILES = 64


def elf_files(folder: Path) -> list[Path]:
    """The shared libraries and extension modules in a folder."""
    paths = (path for path in sorted(folder.rglob("*.so*")) if path.is_file() and not path.is_symlink())
    return [path for path in paths if path.read_bytes()[:4] == b"\x7fELF"]


def find_needed(files: list[Path]) -> tuple[set[Path], set[str]]:
    """What files need, directly and indirectly: the paths of libraries, and the names of those not found."""
    if (ldd := shutil.which("ldd")) is None:
        raise SystemExit("error: ldd is not installed")
    paths, missing = set(), set()
    for start in range(0, len(files), _FILES):
        command = [ldd, *map(str, files[start : start + _FILES])]
        # The status is 1 if one of the files is not a dynamic executable.
        result = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
        for name, path in _LINE.findall(result.stdout):
            if path == "not found":
                missing.add(name)
            else:
                paths.add(Path(path))
    return paths, missing


def canonical(path: Path) -> Path:
    """A path without symbolic links in its folders; /lib is one to /usr/lib."""
    return path.parent.resolve() / path.name

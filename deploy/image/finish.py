"""Finishes a folder that becomes a layer of an image: removes what only development needs, and compiles.

`python finish.py FOLDER [--root ROOT] [--remove PATTERN]… [--allow-missing LIBRARY]…` leaves the same bytes,
names, modes and times for the same input, so that two builds have the same layers. FOLDER holds what is
copied to / in the image. With ROOT, the root file system of the image, each shared library is checked: what
it needs must be in FOLDER or in ROOT.
"""

import argparse
import compileall
import os
import py_compile
import shutil
import stat
from pathlib import Path

from libraries import canonical, elf_files, find_needed

# Folders and files in packages that are for tests and for development.
FOLDERS = ("__pycache__", "tests", "include")
SUFFIXES = (".a", ".c", ".cpp", ".h", ".hpp", ".pxd", ".pyi", ".pyx")


def main() -> None:
    """Finishes the folder that the command line names."""
    parser = argparse.ArgumentParser(description="Finish a folder that becomes a layer of an image.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--root", type=Path, help="root file system that libraries are checked against")
    parser.add_argument("--remove", action="append", default=[], help="glob pattern, within the folder")
    parser.add_argument("--allow-missing", action="append", default=[], help="library that the host provides")
    options = parser.parse_args()
    remove_unused(options.folder, options.remove)
    if options.root:
        check_libraries(options.folder, options.root, set(options.allow_missing))
    compile_modules(options.folder)
    set_modes_and_times(options.folder, int(os.environ["SOURCE_DATE_EPOCH"]))


def remove_unused(folder: Path, patterns: list[str]) -> None:
    """Removes tests, headers, stubs of types and caches, and what the patterns name.

    Raises:
        SystemExit: A pattern matches nothing: the package has changed.
    """
    unused = {path for path in folder.rglob("*") if not path.is_symlink() and _is_unused(path)}
    for pattern in patterns:
        matches = set(folder.glob(pattern))
        if not matches:
            raise SystemExit(f"error: --remove {pattern}: nothing in {folder} has such a name")
        unused |= matches
    for path in sorted(unused, reverse=True):  # what a folder holds, then the folder
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def _is_unused(path: Path) -> bool:
    return path.name in FOLDERS if path.is_dir() else path.suffix in SUFFIXES


def check_libraries(folder: Path, root: Path, allowed: set[str]) -> None:
    """Checks that all libraries that those in the folder need are in the image.

    Raises:
        SystemExit: A library is missing.
    """
    files = elf_files(folder)
    paths, missing = find_needed(files)
    missing -= {
        path.name for path in files
    } | allowed  # some packages load their libraries by path before they are needed
    for path in paths:
        if not path.is_relative_to(folder) and not (root / str(canonical(path)).lstrip("/")).exists():
            missing.add(str(path))
    if missing:
        names = ", ".join(sorted(missing))
        raise SystemExit(f"error: the image lacks {names}; see WHEEL_LIBRARIES in assemble.py")


def compile_modules(folder: Path) -> None:
    """Compiles every module: the image is read-only, and a start without compiled modules takes longer."""
    compileall.compile_dir(
        folder,
        quiet=2,  # some packages hold modules for other versions of Python
        stripdir=str(folder),
        prependdir="/",
        invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH,
    )


def set_modes_and_times(folder: Path, seconds: int) -> None:
    """Gives every file and folder one time, and modes that do not depend on the umask."""
    for path in sorted([folder, *folder.rglob("*")], reverse=True):
        if not path.is_symlink():
            mode = stat.S_IMODE(path.lstat().st_mode)
            if mode & stat.S_ISVTX:
                path.chmod(0o1777)
            else:
                path.chmod(0o755 if path.is_dir() or mode & stat.S_IXUSR else 0o644)
        os.utime(path, (seconds, seconds), follow_symlinks=False)


if __name__ == "__main__":
    main()

"""Makes the root file system of the images: an interpreter, the C library and little else.

`python assemble.py FOLDER` copies this interpreter, its standard library and the shared libraries that they
and binary wheels need. There is neither a shell nor a package manager. The Debian packages that files come
from are recorded in /var/lib/dpkg/status.d, where scanners of images look for them.
"""

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from libraries import canonical, elf_files, find_needed

USER, USER_ID = "attention", 10001
# Parts of the standard library that no service uses.
UNUSED = (
    "__pycache__",
    "_curses*",
    "_dbm*",
    "_gdbm*",
    "_tkinter*",
    "config-*",
    "dist-packages",
    "ensurepip",
    "idlelib",
    "lib2to3",
    "nis.*",
    "ossaudiodev*",
    "pydoc_data",
    "readline.*",
    "site-packages",
    "sitecustomize.py",
    "test",
    "tests",
    "tkinter",
    "turtle.py",
    "turtledemo",
)
# Libraries that binary wheels link to, or that the C library opens by itself.
WHEEL_LIBRARIES = (
    "libc.so.6",
    "libdl.so.2",
    "libgcc_s.so.1",
    "libm.so.6",
    "libnss_dns.so.2",
    "libnss_files.so.2",
    "libpthread.so.0",
    "libresolv.so.2",
    "librt.so.1",
    "libstdc++.so.6",
    "libutil.so.1",
)
CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")
FILES = {
    "etc/passwd": f"root:x:0:0::/root:/sbin/nologin\n{USER}:x:{USER_ID}:{USER_ID}::/tmp:/sbin/nologin\n",
    "etc/group": f"root:x:0:\n{USER}:x:{USER_ID}:\n",
    "etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
}
# The folders of a Debian system that lead to /usr.
LINKS = ("bin", "lib", "lib64")


def main() -> None:
    """Fills the folder that the command line names."""
    root = Path(sys.argv[1])
    for link in LINKS:
        (root / "usr" / link).mkdir(parents=True)
        (root / link).symlink_to(f"usr/{link}")
    for name, text in FILES.items():
        _write(root / name, text)
    for folder in ("app", "tmp"):
        (root / folder).mkdir()
    (root / "tmp").chmod(0o1777)
    _record_packages(root, [*_copy_interpreter(root), *_copy_libraries(root), *_copy_certificates(root)])
    _write_linker_cache(root)


def _copy_interpreter(root: Path) -> list[Path]:
    """Copies the interpreter with its standard library; returns the files that its packages own."""
    program = Path(sys.executable).resolve()
    library = Path(sysconfig.get_path("stdlib"))
    _copy(program, root)
    for name in ("python", "python3"):
        link = root / str(program.parent / name).lstrip("/")
        link.symlink_to(program.name)
    shutil.copytree(library, root / str(library).lstrip("/"), ignore=shutil.ignore_patterns(*UNUSED))
    return [program, *library.glob("*.py"), *library.glob("lib-dynload/*")]


def _copy_libraries(root: Path) -> list[Path]:
    modules = elf_files(root / sysconfig.get_path("stdlib").lstrip("/"))
    libraries, _ = find_needed([Path(sys.executable).resolve(), *modules])
    folder = next(path.parent for path in libraries if path.name == "libc.so.6")
    libraries |= {path for name in WHEEL_LIBRARIES if (path := folder / name).exists()}
    paths = sorted({canonical(path) for path in libraries})
    for path in paths:
        _copy(path, root)
    return paths


def _copy_certificates(root: Path) -> list[Path]:
    """Certificates of public authorities, where OpenSSL looks for them; none if the base has none."""
    if not CERTIFICATES.exists():
        return []
    _copy(CERTIFICATES, root)
    target = root / "usr/lib/ssl"
    target.mkdir(parents=True)
    (target / "certs").symlink_to("/etc/ssl/certs")
    (target / "cert.pem").symlink_to(CERTIFICATES)
    return [Path("/usr/share/doc/ca-certificates/copyright")]


def _write_linker_cache(root: Path) -> None:
    """Some builds of Python keep libpython in /usr/local/lib, which the linker finds by its cache only."""
    _write(root / "etc/ld.so.conf", "/usr/local/lib\n")
    subprocess.run(["/sbin/ldconfig", "-r", str(root)], check=True)  # noqa: S603 - a fixed program
    shutil.rmtree(root / "var/cache", ignore_errors=True)


def _record_packages(root: Path, files: list[Path]) -> None:
    """Copies the description and the license of each Debian package that one of the files belongs to."""
    # Packages name the files of /usr/lib also as /lib.
    names = {str(path) for path in files} | {str(path).removeprefix("/usr") for path in files}
    owners = _output("dpkg-query", "--search", *sorted(names)).splitlines()
    for package in sorted({name for line in owners for name in line.split(": ")[0].split(", ")}):
        name = package.split(":")[0]
        _write(root / "var/lib/dpkg/status.d" / name, _output("dpkg-query", "--status", package))
        license_file = Path("/usr/share/doc") / name / "copyright"
        if license_file.exists():
            _copy(license_file, root)


def _output(*command: str) -> str:
    # The status is 1 if a file belongs to no package.
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout  # noqa: S603


def _copy(path: Path, root: Path) -> None:
    """Copies a file to the same place; a link to a file becomes the file."""
    target = root / str(path).lstrip("/")
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(path, target)


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


if __name__ == "__main__":
    main()

"""Generates the Python code of every .proto file: `python -m protos.generate [--check]`.

The server's code is written next to the .proto files. The client is installed without this repository, so
the code of the typed API is also written into the client's package. protoc generates imports relative to the
root of the proto path; the generated modules are parts of packages, so these imports are rewritten.
"""

import argparse
import sys
import sysconfig
import tempfile
from pathlib import Path

from grpc_tools import protoc

PROTOS = Path(__file__).resolve().parent
CLIENT = PROTOS.parent / "clients/python/src/attention_client/_generated"
ATTENTION = "attention/v1/attention.proto"
OPEN_INFERENCE = "inference/open_inference.proto"
TEI = "tei/v1/tei.proto"
# For each target: its folder, its Python package, and the .proto files that are generated there.
TARGETS = (
    (PROTOS, "attention_serving.protos", (ATTENTION, OPEN_INFERENCE, TEI)),
    (CLIENT, "attention_client._generated", (ATTENTION, OPEN_INFERENCE)),
)


def generated(package: str, sources: tuple[str, ...]) -> dict[str, str]:
    """Runs protoc and returns the text of each generated file by its path relative to the target."""
    with tempfile.TemporaryDirectory() as folder:
        scripts = Path(sysconfig.get_path("scripts"))
        plugins = [f"--plugin={scripts / name}" for name in ("protoc-gen-mypy", "protoc-gen-mypy_grpc")]
        outputs = [f"--{kind}_out={folder}" for kind in ("python", "grpc_python", "mypy", "mypy_grpc")]
        arguments = ["protoc", f"-I{PROTOS}", *plugins, *outputs, *sources]
        if protoc.main(arguments) != 0:
            raise SystemExit("protoc failed; see its message above")
        files = sorted(path for path in Path(folder).rglob("*") if path.is_file())
        return {str(path.relative_to(folder)): _in_package(path.read_text(), package) for path in files}


def _in_package(code: str, package: str) -> str:
    for root in ("attention.v1", "inference", "tei.v1"):
        code = code.replace(f"\nfrom {root} import ", f"\nfrom {package}.{root} import ")
    return code


def main() -> int:
    """Writes the code. With --check, lists the files that are out of date instead, and returns 1."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit with status 1 if a file is out of date"
    )
    check = parser.parse_args().check
    stale = []
    for folder, package, sources in TARGETS:
        for name, code in generated(package, sources).items():
            path = folder / name
            if path.exists() and path.read_text() == code:
                continue
            stale.append(path)
            if not check:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(code)
    for path in stale:
        print(f"{'out of date' if check else 'written'}: {path.relative_to(PROTOS.parent)}")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())

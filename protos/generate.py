"""Generates the Python code of every .proto file: `python -m protos.generate [--check]`.

Writes beside the .proto files, for the server, and the typed API's code into the client, which is
installed without this repository. protoc imports generated modules from the root of the proto path;
ours live inside packages, so the one import line of each service module is rewritten.
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
# Where the code goes, the package it becomes part of, and what is generated there.
TARGETS = (
    (PROTOS, "protos", (ATTENTION, OPEN_INFERENCE)),
    (CLIENT, "attention_client._generated", (ATTENTION,)),
)


def generated(package: str, sources: tuple[str, ...]) -> dict[str, str]:
    """Runs protoc and returns the text of each generated file by its path below the target."""
    with tempfile.TemporaryDirectory() as folder:
        scripts = Path(sysconfig.get_path("scripts"))
        plugins = [f"--plugin={scripts / name}" for name in ("protoc-gen-mypy", "protoc-gen-mypy_grpc")]
        outputs = [f"--{kind}_out={folder}" for kind in ("python", "grpc_python", "mypy", "mypy_grpc")]
        arguments = ["protoc", f"-I{PROTOS}", *plugins, *outputs, *sources]
        if protoc.main(arguments) != 0:
            raise SystemExit("protoc failed; its message stands above")
        files = sorted(path for path in Path(folder).rglob("*") if path.is_file())
        return {str(path.relative_to(folder)): _in_package(path.read_text(), package) for path in files}


def _in_package(code: str, package: str) -> str:
    for root in ("attention.v1", "inference"):
        code = code.replace(f"\nfrom {root} import ", f"\nfrom {package}.{root} import ")
    return code


def main() -> int:
    """Writes the code, or with --check names the files that are out of date and returns 1."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--check", action="store_true", help="change nothing; fail where a file is out of date"
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

"""Adds the Debian packages of an image to its CycloneDX document, and lists all packages.

`python sbom.py DOCUMENT STATUS_FOLDER OUTPUT_FOLDER` reads the document of the Python packages and the folder
/var/lib/dpkg/status.d of the image; it writes sbom.cdx.json and packages.txt.
"""

import json
import sys
from email.parser import Parser
from pathlib import Path
from typing import Any
from urllib.parse import quote


def main() -> None:
    """Writes both files."""
    document_file, status_folder, output = map(Path, sys.argv[1:])
    document: dict[str, Any] = json.loads(document_file.read_text())
    debian = [debian_component(path.read_text()) for path in sorted(status_folder.iterdir())]
    components: list[dict[str, Any]] = document.setdefault("components", []) + debian
    for component in components:
        # Packages of local wheels have none: they need not be those of the index with that name.
        component.setdefault("purl", f"pkg:generic/{component['name']}@{component['version']}")
    document["components"] = sorted(components, key=lambda component: component["bom-ref"])
    output.mkdir(parents=True, exist_ok=True)
    (output / "sbom.cdx.json").write_text(json.dumps(document, indent=2, sort_keys=True) + "\n")
    purls = [f"{component['purl']}\n" for component in document["components"]]
    (output / "packages.txt").write_text("".join(purls))


def debian_component(status: str) -> dict[str, Any]:
    """The component of a package, from its stanza in dpkg's status."""
    fields = Parser().parsestr(status)
    name, version, architecture = fields["Package"], fields["Version"], fields["Architecture"]
    purl = f"pkg:deb/debian/{name}@{quote(version, safe='.-~+:')}?arch={architecture}"
    return {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl}


if __name__ == "__main__":
    main()

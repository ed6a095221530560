"""The KServe manifests: rendered, and compared with KServe's own schema and with this project's server.

KServe's schema is not part of this repository. KSERVE_CRDS may name a folder with KServe's definitions of
both resources, `clusterservingruntimes.yaml` and `inferenceservices.yaml` (config/crd/full in KServe's
repository, there with the prefix `serving.kserve.io_`).
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from attention_serving.artifact.manifest import Manifest

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "deploy/kserve"
OVERLAYS = {"http1": ("v2", 8000), "h2c": ("grpc-v2", 8001)}
SCHEMAS = {"ClusterServingRuntime": "clusterservingruntimes", "InferenceService": "inferenceservices"}
CRDS = os.environ.get("KSERVE_CRDS", "")
needs_kubectl = pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
needs_schema = pytest.mark.skipif(not CRDS, reason="KSERVE_CRDS names no folder of KServe's definitions")


def load(path: str) -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load((FOLDER / path).read_text())
    return document


def rendered(overlay: str) -> dict[str, Any]:
    """The runtime of an overlay, as kustomize renders it."""
    command = ["kubectl", "kustomize", str(FOLDER / overlay)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    document: dict[str, Any] = yaml.safe_load(done.stdout)
    return document


def container(runtime: dict[str, Any]) -> dict[str, Any]:
    (only,) = runtime["spec"]["containers"]
    assert isinstance(only, dict)
    return only


def schema_errors(document: dict[str, Any]) -> list[str]:
    """What KServe's definition of a resource says about a document; unknown fields are errors."""
    path = Path(CRDS) / f"{SCHEMAS[document['kind']]}.yaml"
    definition = yaml.load(path.read_text(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # noqa: S506
    group, version = document["apiVersion"].split("/")
    assert definition["spec"]["group"] == group
    (schema,) = (v["schema"] for v in definition["spec"]["versions"] if v["name"] == version)
    closed = _closed(schema["openAPIV3Schema"])
    closed["properties"]["metadata"] = {"type": "object"}
    return [error.message for error in jsonschema.Draft7Validator(closed).iter_errors(document)]


def _closed(schema: Any) -> Any:
    """A schema that refuses the fields which an API server would silently remove."""
    if isinstance(schema, list):
        return [_closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    found = {key: _closed(value) for key, value in schema.items()}
    if "properties" in schema and not schema.get("x-kubernetes-preserve-unknown-fields"):
        found.setdefault("additionalProperties", False)
    return found


def test_the_service_asks_for_a_format_and_protocol_that_the_runtime_has() -> None:
    model = load("inference-service.yaml")["spec"]["predictor"]["model"]
    spec = load("base/runtime.yaml")["spec"]
    formats = [(each["name"], each["version"]) for each in spec["supportedModelFormats"]]
    assert (model["modelFormat"]["name"], model["modelFormat"]["version"]) in formats
    assert model["protocolVersion"] in spec["protocolVersions"]
    assert model["modelFormat"]["version"] == str(Manifest.model_fields["format_version"].default)


@needs_kubectl
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_each_overlay_serves_one_protocol_on_one_port_of_its_name(overlay: str) -> None:
    runtime, (protocol, port) = rendered(overlay), OVERLAYS[overlay]
    own = container(runtime)
    assert runtime["metadata"]["name"] == f"attention-serving-{overlay}"
    assert runtime["spec"]["protocolVersions"] == [protocol]
    assert own["name"] == "kserve-container"
    assert own["ports"] == [{"name": overlay, "containerPort": port, "protocol": "TCP"}]
    (probe,) = own["readinessProbe"].values()
    assert probe["port"] == port


@needs_kubectl
def test_the_arguments_are_options_of_the_server() -> None:
    help_text = subprocess.run(
        [sys.executable, "-m", "server", "--help"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    options = set(re.findall(r"--[a-z][a-z-]+", help_text))
    for overlay, (_, port) in OVERLAYS.items():
        arguments = dict(argument.split("=", 1) for argument in container(rendered(overlay))["args"])
        assert arguments.keys() <= options
        assert arguments["--model-repository"] == "/mnt/models"
        assert str(port) in (arguments["--port"], arguments.get("--http-port"))


@needs_schema
@needs_kubectl
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_kserves_schema_accepts_the_runtimes(overlay: str) -> None:
    assert schema_errors(rendered(overlay)) == []


@needs_schema
def test_kserves_schema_accepts_the_service_and_refuses_a_misspelt_one() -> None:
    service = load("inference-service.yaml")
    assert schema_errors(service) == []
    service["spec"]["predictor"]["model"]["storageURI"] = "pvc://models"
    assert any("storageURI" in message for message in schema_errors(service))

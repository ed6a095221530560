"""The manifests for Kubernetes and KServe: rendered by kustomize, compared with schemas and with the server.

kubernetes-validate carries the schemas of Kubernetes; others are not checked.
"""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from attention_serving.artifact.manifest import Manifest
from attention_serving.server.api.methods import SERVICES
from attention_serving.server.observe.metrics import Metrics
from attention_serving.server.settings import Settings
from attention_serving.server.shutdown import EXIT_SECONDS
from scripts.local_server import ROOT

FOLDER, KSERVE = ROOT / "deploy/kubernetes", ROOT / "deploy/kserve"
OVERLAYS, COMPONENTS = ("cpu", "cuda", "dev"), ("hpa", "model-image")
VERSION = "1.34"
# Resources of other projects.
CUSTOM = ("ServiceMonitor", "ScaledObject")
METRIC = "attention_predicted_queue_seconds"
needs_kubectl = pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")

Document = dict[str, Any]


def load(path: Path) -> list[Document]:
    return list(yaml.safe_load_all(path.read_text()))


DOCUMENTS = [each for path in sorted(FOLDER.rglob("*.yaml")) for each in load(path)]


def rendered(folder: Path) -> list[Document]:
    command = ["kubectl", "kustomize", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return list(yaml.safe_load_all(done.stdout))


def one(found: list[Document], kind: str, name: str = "attention") -> Document:
    (only,) = (each for each in found if each["kind"] == kind and each["metadata"]["name"] == name)
    return only


@pytest.fixture
def spec() -> Document:
    """The pods of the base."""
    (deployment,) = load(FOLDER / "base/deployment.yaml")
    found: Document = deployment["spec"]["template"]["spec"]
    return found


def checked(folder: Path) -> list[Document]:
    """What kustomize renders, after a comparison with the schemas; unknown fields are errors."""
    validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    found = rendered(folder)
    for document in found:
        if document["kind"] not in CUSTOM:
            validate.validate(document, VERSION, strict=True)
    return found


@needs_kubectl
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_what_kustomize_renders_is_valid_and_its_names_meet_each_other(overlay: str) -> None:
    found = checked(FOLDER / "overlays" / overlay)
    template = one(found, "Deployment")["spec"]["template"]
    labels = template["metadata"]["labels"].items()
    ports = {port["name"] for port in template["spec"]["containers"][0]["ports"]}
    for name in ("attention", "attention-headless"):
        service = one(found, "Service", name)["spec"]
        assert service["selector"].items() <= labels
        assert {port["targetPort"] for port in service["ports"]} <= ports
    assert service["clusterIP"] == "None"
    for kind in ("PodDisruptionBudget", "Deployment"):
        assert one(found, kind)["spec"]["selector"]["matchLabels"].items() <= labels
    policy = one(found, "NetworkPolicy")["spec"]
    assert policy["podSelector"]["matchLabels"].items() <= labels
    (source,) = template["spec"]["containers"][0]["envFrom"]
    assert one(found, "ConfigMap", source["configMapRef"]["name"])
    if overlay != "dev":
        selector = one(found, "ServiceMonitor")["spec"]["selector"]["matchLabels"].items()
        monitored = [each for each in found if selector <= each["metadata"].get("labels", {}).items()]
        kinds = [each["metadata"]["name"] for each in monitored if each["kind"] == "Service"]
        assert kinds == ["attention"], "each server is scraped once"
        assert "replicas" not in one(found, "Deployment")["spec"], "the autoscaler sets it"


@needs_kubectl
@pytest.mark.parametrize("component", COMPONENTS)
def test_the_other_components_fit_the_base(component: str, tmp_path: Path) -> None:
    shutil.copytree(FOLDER, tmp_path / "kubernetes")
    overlay = tmp_path / "kubernetes/overlays/test"
    overlay.mkdir()
    fields = {"resources": ["../../base"], "components": [f"../../components/{component}"]}
    (overlay / "kustomization.yaml").write_text(yaml.safe_dump(fields))
    assert one(checked(overlay), "Deployment")


def test_containers_are_restricted_and_write_to_volumes_only(spec: Document) -> None:
    assert spec["securityContext"]["runAsNonRoot"]
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert spec["automountServiceAccountToken"] is False
    assert spec["enableServiceLinks"] is False, "the Service `attention` would set ATTENTION_PORT"
    for container in spec["containers"] + spec["initContainers"]:
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
        }
        assert container["resources"]["requests"]
        assert container["resources"]["limits"]["memory"]


def test_probes_ask_for_services_that_the_server_reports(spec: Document) -> None:
    (server,) = spec["containers"]
    for probe in ("startupProbe", "readinessProbe"):
        assert server[probe]["grpc"]["service"] in SERVICES
    assert "service" not in server["livenessProbe"]["grpc"], "it must not depend on models"


def test_settings_are_options_of_the_server_and_leave_a_pod_time_to_drain(spec: Document) -> None:
    texts = [path.read_text() for path in FOLDER.rglob("kustomization.yaml")]
    found = {name: value for text in texts for name, value in re.findall(r"- ATTENTION_(\w+)=(\S+)", text)}
    assert {name.lower() for name in found} <= Settings.model_fields.keys()
    pause = spec["containers"][0]["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert spec["terminationGracePeriodSeconds"] > pause + float(found["GRACE_SECONDS"]) + EXIT_SECONDS


def test_autoscalers_use_a_metric_that_the_server_has() -> None:
    assert METRIC in {family.name for family in Metrics().registry.collect()}
    (metric,) = one(DOCUMENTS, "HorizontalPodAutoscaler")["spec"]["metrics"]
    assert metric["pods"]["metric"]["name"] == METRIC
    (trigger,) = one(DOCUMENTS, "ScaledObject")["spec"]["triggers"]
    assert METRIC in trigger["metadata"]["query"]


def test_the_service_of_kserve_asks_for_a_format_and_protocol_that_the_runtime_has() -> None:
    (service,), (runtime,) = load(KSERVE / "inference-service.yaml"), load(KSERVE / "base/runtime.yaml")
    model = service["spec"]["predictor"]["model"]
    assert {**model["modelFormat"], "autoSelect": True} in runtime["spec"]["supportedModelFormats"]
    assert model["protocolVersion"] in runtime["spec"]["protocolVersions"]
    assert model["modelFormat"]["version"] == str(Manifest.model_fields["format_version"].default)


@needs_kubectl
@pytest.mark.parametrize(("overlay", "protocol", "port"), [("http1", "v2", 8000), ("h2c", "grpc-v2", 8001)])
def test_an_overlay_of_kserve_serves_one_protocol_on_one_port_of_its_name(
    overlay: str, protocol: str, port: int
) -> None:
    (runtime,) = rendered(KSERVE / overlay)
    (container,) = runtime["spec"]["containers"]
    assert runtime["metadata"]["name"] == f"attention-serving-{overlay}"
    assert runtime["spec"]["protocolVersions"] == [protocol]
    assert container["ports"] == [{"name": overlay, "containerPort": port, "protocol": "TCP"}]
    arguments = dict(argument.removeprefix("--").split("=", 1) for argument in container["args"])
    assert {name.replace("-", "_") for name in arguments} <= Settings.model_fields.keys()
    assert arguments["model-repository"] == "/mnt/models"
    assert str(port) in (arguments["port"], arguments.get("http-port"))

"""The Kubernetes manifests: rendered by kustomize, and compared with the API's schemas and with the server.

kubernetes-validate carries the schemas of Kubernetes. Those of ServiceMonitor and ScaledObject are not part
of a Python package: CUSTOM_RESOURCE_DEFINITIONS may name a folder with `servicemonitors.yaml` of the
Prometheus operator and `scaledobjects.yaml` of KEDA.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from attention_serving.server.api.methods import SERVICES
from attention_serving.server.observe.metrics import Metrics
from attention_serving.server.settings import Settings
from attention_serving.server.shutdown import EXIT_SECONDS
from tests.deploy.test_kserve import _closed as closed

FOLDER = Path(__file__).resolve().parents[2] / "deploy/kubernetes"
OVERLAYS = ("cpu", "cuda", "dev")
VERSION = "1.34"
DEFINITIONS = os.environ.get("CUSTOM_RESOURCE_DEFINITIONS", "")
CUSTOM = {"ServiceMonitor": "servicemonitors", "ScaledObject": "scaledobjects"}
# Files of kustomize itself.
OWN = ("Kustomization", "Component")
METRIC = "attention_predicted_queue_seconds"
needs_kubectl = pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
needs_definitions = pytest.mark.skipif(
    not DEFINITIONS, reason="CUSTOM_RESOURCE_DEFINITIONS names no folder of definitions"
)

Document = dict[str, Any]


def documents() -> Iterator[tuple[Path, Document]]:
    """The documents of all files, except kustomize's own."""
    for path in sorted(FOLDER.rglob("*.yaml")):
        for document in yaml.safe_load_all(path.read_text()):
            if document["kind"] not in OWN:
                yield path, document


def rendered(folder: Path) -> list[Document]:
    command = ["kubectl", "kustomize", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return list(yaml.safe_load_all(done.stdout))


def one(found: list[Document], kind: str, name: str = "attention") -> Document:
    (only,) = (each for each in found if each["kind"] == kind and each["metadata"]["name"] == name)
    return only


def pod(deployment: Document) -> Document:
    spec: Document = deployment["spec"]["template"]["spec"]
    return spec


def base() -> list[Document]:
    return [document for path, document in documents() if path.parent.name == "base"]


def schema_errors(document: Document) -> list[str]:
    """What the schema of a resource says about it; unknown fields are errors."""
    if document["kind"] in CUSTOM:
        return _custom_errors(document)
    validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    try:
        validate.validate(document, VERSION, strict=True)
    except validate.ValidationError as error:
        return [str(error)]
    return []


def _custom_errors(document: Document) -> list[str]:
    path = Path(DEFINITIONS) / f"{CUSTOM[document['kind']]}.yaml"
    definition = yaml.load(path.read_text(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # noqa: S506
    group, version = document["apiVersion"].split("/")
    assert definition["spec"]["group"] == group
    (schema,) = (each["schema"] for each in definition["spec"]["versions"] if each["name"] == version)
    strict = closed(schema["openAPIV3Schema"])
    strict["properties"]["metadata"] = {"type": "object"}
    return [error.message for error in jsonschema.Draft7Validator(strict).iter_errors(document)]


NATIVE = [(path, each) for path, each in documents() if each["kind"] not in CUSTOM]


@pytest.mark.parametrize(
    ("path", "document"), NATIVE, ids=[f"{each['kind']}-{each['metadata']['name']}" for _, each in NATIVE]
)
def test_the_schema_accepts_each_resource(path: Path, document: Document) -> None:
    assert schema_errors(document) == [], path


def test_the_schema_refuses_a_field_that_is_misspelt() -> None:
    deployment = one(base(), "Deployment")
    pod(deployment)["containers"][0]["readinessProb"] = {}
    assert "readinessProb" in "".join(schema_errors(deployment))


@needs_kubectl
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_schemas_accept_what_kustomize_renders(overlay: str) -> None:
    found = rendered(FOLDER / "overlays" / overlay)
    kinds = {each["kind"] for each in found}
    assert {"Deployment", "Service", "NetworkPolicy", "PodDisruptionBudget"} <= kinds
    for document in found:
        if document["kind"] not in CUSTOM:
            assert schema_errors(document) == []


@needs_definitions
def test_the_definitions_accept_the_custom_resources() -> None:
    found = {document["kind"]: document for _, document in documents() if document["kind"] in CUSTOM}
    assert found.keys() == CUSTOM.keys()
    for document in found.values():
        assert schema_errors(document) == []
        document["spec"]["misspelt"] = 1
        assert any("misspelt" in message for message in schema_errors(document))


@needs_kubectl
@pytest.mark.parametrize("component", ["hpa", "model-image"])
def test_the_other_components_fit_the_base(component: str, tmp_path: Path) -> None:
    shutil.copytree(FOLDER, tmp_path / "kubernetes")
    overlay = tmp_path / "kubernetes/overlays/test"
    overlay.mkdir()
    components = [f"../../components/{component}"]
    (overlay / "kustomization.yaml").write_text(
        yaml.safe_dump({"resources": ["../../base"], "components": components})
    )
    found = rendered(overlay)
    for document in found:
        assert schema_errors(document) == []
    deployment = one(found, "Deployment")
    if component == "hpa":
        assert "replicas" not in deployment["spec"]
        assert one(found, "HorizontalPodAutoscaler")
    else:
        assert "initContainers" not in pod(deployment)
        assert pod(deployment)["volumes"][0]["image"]["reference"].startswith("attention-models")


def test_containers_are_restricted_and_write_to_volumes_only() -> None:
    spec = pod(one(base(), "Deployment"))
    assert spec["securityContext"]["runAsNonRoot"]
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert spec["automountServiceAccountToken"] is False
    for container in spec["containers"] + spec["initContainers"]:
        context = container["securityContext"]
        assert context["readOnlyRootFilesystem"]
        assert not context["allowPrivilegeEscalation"]
        assert context["capabilities"] == {"drop": ["ALL"]}
        assert container["resources"]["requests"]
        assert container["resources"]["limits"]["memory"]


def test_service_links_are_off_because_they_would_set_options_of_the_server() -> None:
    assert pod(one(base(), "Deployment"))["enableServiceLinks"] is False
    assert "port" in Settings.model_fields, "the Service `attention` would set ATTENTION_PORT"


def test_probes_ask_for_services_that_the_server_reports() -> None:
    (server,) = pod(one(base(), "Deployment"))["containers"]
    for probe in ("startupProbe", "readinessProbe"):
        assert server[probe]["grpc"]["service"] in SERVICES
    assert "service" not in server["livenessProbe"]["grpc"], "it must not depend on models"
    probes = [probe for name, probe in server.items() if name.endswith("Probe")]
    assert len(probes) == 3
    assert {probe["grpc"]["port"] for probe in probes} <= {each["containerPort"] for each in server["ports"]}


def test_a_pod_has_time_to_drain() -> None:
    spec = pod(one(base(), "Deployment"))
    settings = base_settings()
    pause = spec["containers"][0]["lifecycle"]["preStop"]["sleep"]["seconds"]
    needed = pause + float(settings["ATTENTION_GRACE_SECONDS"]) + EXIT_SECONDS
    assert spec["terminationGracePeriodSeconds"] > needed


def base_settings() -> dict[str, str]:
    kustomization = yaml.safe_load((FOLDER / "base/kustomization.yaml").read_text())
    (generator,) = kustomization["configMapGenerator"]
    return dict(literal.split("=", 1) for literal in generator["literals"])


def test_settings_are_options_of_the_server() -> None:
    files = [path.read_text() for path in FOLDER.rglob("kustomization.yaml")]
    names = {name.lower() for text in files for name in re.findall(r"- ATTENTION_([A-Z_]+)=", text)}
    assert {"insecure", "grace_seconds"} <= names
    assert names <= Settings.model_fields.keys()


def test_autoscalers_use_a_metric_that_the_server_has() -> None:
    metrics = {family.name for family in Metrics().registry.collect()}
    assert METRIC in metrics
    found = {document["kind"]: document for _, document in documents()}
    (metric,) = found["HorizontalPodAutoscaler"]["spec"]["metrics"]
    assert metric["pods"]["metric"]["name"] == METRIC
    (trigger,) = found["ScaledObject"]["spec"]["triggers"]
    assert METRIC in trigger["metadata"]["query"]


@needs_kubectl
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_selectors_meet_the_pods_and_names_meet_each_other(overlay: str) -> None:
    found = rendered(FOLDER / "overlays" / overlay)
    template = one(found, "Deployment")["spec"]["template"]
    labels = template["metadata"]["labels"].items()
    for name in ("attention", "attention-headless"):
        service = one(found, "Service", name)
        assert service["spec"]["selector"].items() <= labels
        ports = {port["name"] for port in template["spec"]["containers"][0]["ports"]}
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports
    for kind in ("PodDisruptionBudget", "Deployment"):
        assert one(found, kind)["spec"]["selector"]["matchLabels"].items() <= labels
    assert one(found, "NetworkPolicy")["spec"]["podSelector"]["matchLabels"].items() <= labels
    assert one(found, "Service", "attention-headless")["spec"]["clusterIP"] == "None"
    (source,) = template["spec"]["containers"][0]["envFrom"]
    assert one(found, "ConfigMap", source["configMapRef"]["name"])
    if overlay != "dev":
        selector = one(found, "ServiceMonitor")["spec"]["selector"]["matchLabels"]
        monitored = [
            each["metadata"]["name"]
            for each in found
            if each["kind"] == "Service" and selector.items() <= each["metadata"]["labels"].items()
        ]
        assert monitored == ["attention"], "each server is scraped once"
        assert "replicas" not in one(found, "Deployment")["spec"], "the autoscaler sets it"


@needs_kubectl
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_pods_with_the_label_of_clients_may_call(overlay: str) -> None:
    policy = one(rendered(FOLDER / "overlays" / overlay), "NetworkPolicy")
    calls, _ = policy["spec"]["ingress"]
    expression = {"key": "attention-client", "operator": "In", "values": ["true"]}
    assert calls["from"] == [{"podSelector": {"matchExpressions": [expression]}}]

"""The manifests for Kubernetes, KServe, Docker Compose and Envoy: valid, and about what the server has.

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
from attention_serving.server.lifecycle import EXIT_SECONDS
from attention_serving.server.observe.metrics import Metrics
from attention_serving.server.settings import Settings
from scripts.local_server import ROOT

FOLDER, KSERVE = ROOT / "deploy/kubernetes", ROOT / "deploy/kserve"
VERSION = "1.34"
# Resources of other projects.
CUSTOM = ("ServiceMonitor", "ScaledObject")
needs_kubectl = pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")

Document = dict[str, Any]


def load(path: Path) -> list[Document]:
    return list(yaml.safe_load_all(path.read_text()))


def rendered(folder: Path) -> list[Document]:
    """What kustomize renders, after a comparison with the schemas; unknown fields are errors."""
    validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    command = ["kubectl", "kustomize", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    found = list(yaml.safe_load_all(done.stdout))
    for document in found:
        if document["kind"] not in CUSTOM:
            validate.validate(document, VERSION, strict=True)
    return found


def one(found: list[Document], kind: str, name: str = "attention") -> Document:
    (only,) = (each for each in found if each["kind"] == kind and each["metadata"]["name"] == name)
    return only


@needs_kubectl
@pytest.mark.parametrize("overlay", ["cpu", "cuda", "dev"])
def test_what_kustomize_renders_is_valid_and_its_names_meet_each_other(overlay: str) -> None:
    found = rendered(FOLDER / "overlays" / overlay)
    template = one(found, "Deployment")["spec"]["template"]
    labels = template["metadata"]["labels"].items()
    ports = {port["name"] for port in template["spec"]["containers"][0]["ports"]}
    for name in ("attention", "attention-headless"):
        service = one(found, "Service", name)["spec"]
        assert service["selector"].items() <= labels
        assert {port["targetPort"] for port in service["ports"]} <= ports
    for kind in ("PodDisruptionBudget", "Deployment"):
        assert one(found, kind)["spec"]["selector"]["matchLabels"].items() <= labels
    assert one(found, "NetworkPolicy")["spec"]["podSelector"]["matchLabels"].items() <= labels
    if overlay != "dev":
        selector = one(found, "ServiceMonitor")["spec"]["selector"]["matchLabels"].items()
        monitored = [each for each in found if selector <= each["metadata"].get("labels", {}).items()]
        kinds = [each["metadata"]["name"] for each in monitored if each["kind"] == "Service"]
        assert kinds == ["attention"], "each server is scraped once"
        assert "replicas" not in one(found, "Deployment")["spec"], "the autoscaler sets it"


@needs_kubectl
@pytest.mark.parametrize("component", ["hpa", "model-image"])
def test_the_other_components_fit_the_base(component: str, tmp_path: Path) -> None:
    shutil.copytree(FOLDER, tmp_path / "kubernetes")
    overlay = tmp_path / "kubernetes/overlays/test"
    overlay.mkdir()
    fields = {"resources": ["../../base"], "components": [f"../../components/{component}"]}
    (overlay / "kustomization.yaml").write_text(yaml.safe_dump(fields))
    assert one(rendered(overlay), "Deployment")


def test_settings_exist_and_leave_a_server_time_to_drain() -> None:
    texts = [path.read_text() for path in (*FOLDER.rglob("*.yaml"), ROOT / "docker-compose.yml")]
    variables = {name for text in texts for name in re.findall(r"^ +(?:- )?ATTENTION_(\w+)[=:]", text, re.M)}
    names = {name.lower() for name in variables}
    runtimes = [path.read_text() for path in KSERVE.rglob("*.yaml")]
    options = {name.replace("-", "_") for text in runtimes for name in re.findall(r"- --([a-z-]+)=", text)}
    assert names
    assert options
    assert names | options <= Settings.model_fields.keys()
    (deployment,) = load(FOLDER / "base/deployment.yaml")
    spec = deployment["spec"]["template"]["spec"]
    pause = spec["containers"][0]["lifecycle"]["preStop"]["sleep"]["seconds"]
    (grace,) = {each for text in texts for each in re.findall(r"ATTENTION_GRACE_SECONDS=(\d+)", text)}
    assert spec["terminationGracePeriodSeconds"] > pause + float(grace) + EXIT_SECONDS


def test_containers_are_restricted() -> None:
    (deployment,) = load(FOLDER / "base/deployment.yaml")
    spec = deployment["spec"]["template"]["spec"]
    for container in spec["containers"] + spec["initContainers"]:
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
        }
    for service in compose_services().values():
        assert (service["read_only"], service["cap_drop"]) == (True, ["ALL"])
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))


def compose_services() -> Document:
    (compose,) = load(ROOT / "docker-compose.yml")
    return dict(compose["services"])


def test_compose_serves_a_folder_and_builds_pytorch_for_the_demo_only() -> None:
    services = compose_services()
    profiles = {name: service.get("profiles", []) for name, service in services.items()}
    assert [name for name, needed in profiles.items() if not needed] == ["server"]
    targets = {name: service["build"]["target"] for name, service in services.items() if "build" in service}
    assert [profiles[name] for name, target in targets.items() if target == "exporter"] == [["demo"]]
    for name, service in services.items():
        for other in service.get("depends_on", ()):
            assert profiles[other] in ([], profiles[name]), "a service needs those of its profile only"
    server = services["server"]
    (mount,) = server["volumes"]
    assert (mount["type"], mount["target"], mount["read_only"]) == ("bind", "/models", True)
    assert mount["source"] == "${ATTENTION_MODELS:-./model_repository}"
    assert {port.rpartition(":")[2] for port in server["ports"]} == {"8000", "8001", "8002"}
    grace = Settings.model_fields["grace_seconds"].default
    assert float(server["stop_grace_period"].removesuffix("s")) > grace + EXIT_SECONDS


def test_what_the_pages_write_stays_out_of_git_and_private_keys_out_of_images() -> None:
    secret = ["key.pem", "tls/ca.key", "tls/server.crt", "tokens.json", ".env"]
    tables = ["embeddings.parquet", "served.parquet", "data/table.parquet"]
    files = [*secret, *tables, "my_encoder.py", "weights.html", "model_repository/model/1/manifest.json"]
    command = [shutil.which("git") or "git", "check-ignore", *files]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.split() == files
    first, *rules = (ROOT / ".dockerignore").read_text().split()
    assert first == "*"
    assert {"**/*.key", "**/*.pem"} <= set(rules)


def test_probes_and_health_checks_ask_for_services_that_the_server_reports() -> None:
    (deployment,) = load(FOLDER / "base/deployment.yaml")
    (server,) = deployment["spec"]["template"]["spec"]["containers"]
    asked = [server[probe]["grpc"]["service"] for probe in ("startupProbe", "readinessProbe")]
    asked += re.findall(r"service_name: ([\w.]+)", (ROOT / "deploy/envoy/envoy.yaml").read_text())
    assert len(asked) == 3
    assert set(asked) <= set(SERVICES)
    assert "service" not in server["livenessProbe"]["grpc"], "it must not depend on models"


def test_autoscalers_use_a_metric_that_the_server_has() -> None:
    documents = [each for path in sorted(FOLDER.rglob("*.yaml")) for each in load(path)]
    (metric,) = one(documents, "HorizontalPodAutoscaler")["spec"]["metrics"]
    name = metric["pods"]["metric"]["name"]
    assert name in {family.name for family in Metrics().registry.collect()}
    (trigger,) = one(documents, "ScaledObject")["spec"]["triggers"]
    assert name in trigger["metadata"]["query"]


def test_the_service_of_kserve_asks_for_a_format_that_the_runtime_has() -> None:
    (service,), (runtime,) = load(KSERVE / "inference-service.yaml"), load(KSERVE / "base/runtime.yaml")
    wanted = service["spec"]["predictor"]["model"]["modelFormat"]
    assert {**wanted, "autoSelect": True} in runtime["spec"]["supportedModelFormats"]
    assert wanted["version"] == str(Manifest.model_fields["format_version"].default)

"""The Kubernetes manifests, applied to an API server.

KUBERNETES_TEST_CONFIG names a kubeconfig of an administrator. The server needs no controllers, no
scheduler and no nodes. The definitions of ServiceMonitor and ScaledObject must be installed.
"""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.deploy.test_kubernetes import FOLDER, OVERLAYS, Document, one, pod

CONFIGURATION = os.environ.get("KUBERNETES_TEST_CONFIG", "")
pytestmark = pytest.mark.skipif(
    not (CONFIGURATION and shutil.which("kubectl")), reason="KUBERNETES_TEST_CONFIG names no kubeconfig"
)
COMPONENTS = ("hpa", "model-image")
# The strictest of the Pod Security Standards.
RESTRICTED = "pod-security.kubernetes.io/enforce=restricted"


def kubectl(*arguments: object, text: str = "") -> str:
    """Runs kubectl, which must succeed, and returns what it printed."""
    command = ["kubectl", "--kubeconfig", CONFIGURATION, *map(str, arguments)]
    done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def namespace() -> Iterator[str]:
    created = json.loads(
        kubectl("create", "-f", "-", "-o", "json", text=yaml.safe_dump(_namespace())),
    )
    name: str = created["metadata"]["name"]
    kubectl("label", "namespace", name, RESTRICTED)
    yield name
    kubectl("delete", "namespace", name, "--wait=false")


def _namespace() -> Document:
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": {"generateName": "attention-test-"}}


def overlay(folder: Path, namespace: str, **fields: list[str]) -> Path:
    """An overlay for a namespace, beside a copy of the manifests."""
    shutil.copytree(FOLDER, folder / "kubernetes")
    own = folder / "kubernetes/overlays/test"
    own.mkdir()
    (own / "kustomization.yaml").write_text(yaml.safe_dump({"namespace": namespace, **fields}))
    return own


def check(folder: Path, namespace: str) -> None:
    """Applies an overlay, which must then agree with what is there, and creates a pod of its deployment."""
    kubectl("apply", "--validate=strict", "-k", folder)
    kubectl("diff", "-k", folder)  # fails if applying it again would change something
    found = list(yaml.safe_load_all(kubectl("kustomize", folder)))
    spec = {**pod(one(found, "Deployment")), "serviceAccountName": "default"}
    metadata = {"name": "attention-test", "namespace": namespace}
    document = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}
    kubectl("create", "--validate=strict", "-f", "-", text=yaml.safe_dump(document))


@pytest.mark.parametrize("name", OVERLAYS)
def test_an_api_server_accepts_an_overlay(name: str, namespace: str, tmp_path: Path) -> None:
    check(overlay(tmp_path, namespace, resources=[f"../{name}"]), namespace)


@pytest.mark.parametrize("name", COMPONENTS)
def test_an_api_server_accepts_a_component(name: str, namespace: str, tmp_path: Path) -> None:
    components = [f"../../components/{name}"]
    check(overlay(tmp_path, namespace, resources=["../../base"], components=components), namespace)


def test_an_api_server_refuses_a_pod_that_is_not_restricted(namespace: str) -> None:
    """What the pods above are held against."""
    container = {"name": "a", "image": "a"}
    metadata = {"name": "attention-test", "namespace": namespace}
    document = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {"containers": [container]}}
    with pytest.raises(AssertionError, match="violates PodSecurity"):
        kubectl("create", "-f", "-", text=yaml.safe_dump(document))

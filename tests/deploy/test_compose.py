"""docker-compose.yml: its services, their options and the files that they mount."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from attention_serving.server.settings import Settings
from attention_serving.server.shutdown import EXIT_SECONDS

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVICES: dict[str, dict[str, Any]] = DOCUMENT["services"]
DOCKERFILE = (ROOT / "deploy/Dockerfile").read_text()
COMPOSE = next((name for name in ("docker-compose",) if shutil.which(name)), None)
SERVERS = ("server", "server-cuda", "server-tls")


def test_what_starts_without_a_profile() -> None:
    assert {name for name, service in SERVICES.items() if "profiles" not in service} == {
        "export",
        "server",
        "prometheus",
        "grafana",
    }


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_is_restricted(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"]
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    for port in service.get("ports", []):
        assert port.startswith("127.0.0.1:"), "published on loopback only"


def test_targets_are_stages_of_the_dockerfile() -> None:
    targets = {service["build"]["target"] for service in SERVICES.values() if "build" in service}
    assert targets == {"server", "server-cuda", "client", "exporter", "enrich"}
    assert targets <= set(re.findall(r"^FROM \S+ AS (\S+)", DOCKERFILE, re.MULTILINE))


@pytest.mark.parametrize("name", SERVERS)
def test_a_server_has_time_to_drain_and_settings_that_exist(name: str) -> None:
    service = SERVICES[name]
    grace = Settings.model_fields["grace_seconds"].default + EXIT_SECONDS
    assert float(service["stop_grace_period"].removesuffix("s")) > grace
    options = {variable.removeprefix("ATTENTION_").lower() for variable in service["environment"]}
    assert options <= Settings.model_fields.keys()
    assert "insecure" in options or {"tls_certificate", "tls_key"} <= options


def test_prometheus_scrapes_the_server_under_the_job_name_of_the_rules() -> None:
    configuration = yaml.safe_load((ROOT / "deploy/compose/prometheus.yml").read_text())
    (scrape,) = configuration["scrape_configs"]
    assert scrape["job_name"] == "attention"
    (discovery,) = scrape["dns_sd_configs"]
    assert discovery["names"] == ["server"]
    assert "ATTENTION_METRICS_PORT=8002" in DOCKERFILE
    assert discovery["port"] == 8002


def test_grafana_finds_what_is_mounted() -> None:
    grafana = SERVICES["grafana"]
    mounts = {target: source for source, target, _ in (each.split(":") for each in grafana["volumes"][:-1])}
    for source in mounts.values():
        assert (ROOT / source).exists()
    dashboard = Path(grafana["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"])
    (provisioned,) = (ROOT / mounts["/etc/grafana/provisioning/dashboards"]).glob("*.yml")
    (provider,) = yaml.safe_load(provisioned.read_text())["providers"]
    assert Path(provider["options"]["path"]) == dashboard.parent
    source_file = mounts["/etc/grafana/provisioning/datasources/prometheus.yml"]
    (source,) = yaml.safe_load((ROOT / source_file).read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090"
    assert "prometheus" in SERVICES
    panels = json.loads((ROOT / mounts[str(dashboard)]).read_text())["panels"]
    used = {panel["datasource"]["uid"] for panel in panels if "datasource" in panel}
    assert used == {"${datasource}"}, "a variable, which the default takes"
    assert source["isDefault"]


@pytest.mark.skipif(COMPOSE is None, reason="docker-compose is not installed")
@pytest.mark.parametrize("profile", ["demo", "enrich", "cuda", "tls"])
def test_compose_accepts_the_file(profile: str) -> None:
    assert COMPOSE is not None
    file = str(ROOT / "docker-compose.yml")
    command = [COMPOSE, "--profile", profile, "--file", file, "config", "--services"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert {"export", "server", "prometheus", "grafana"} <= set(done.stdout.split())

"""docker-compose.yml and deploy/envoy: services, options, and the files that they mount or are."""

import re
from typing import Any

import pytest
import yaml

from attention_serving.server.api.methods import SERVICES as REPORTED
from attention_serving.server.settings import Settings
from attention_serving.server.shutdown import EXIT_SECONDS
from scripts.local_server import ROOT

DOCUMENT: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVICES: dict[str, dict[str, Any]] = DOCUMENT["services"]
DOCKERFILE = (ROOT / "deploy/Dockerfile").read_text()


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_is_restricted(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"]
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    for port in service.get("ports", []):
        assert port.startswith("127.0.0.1:"), "published on loopback only"


def test_what_is_built_is_a_stage_of_the_dockerfile() -> None:
    targets = {service["build"]["target"] for service in SERVICES.values() if "build" in service}
    assert targets <= set(re.findall(r"^FROM \S+ AS (\S+)", DOCKERFILE, re.MULTILINE))


@pytest.mark.parametrize("name", ["server", "server-cuda", "server-tls"])
def test_a_server_has_time_to_drain_and_settings_that_exist(name: str) -> None:
    service = SERVICES[name]
    grace = Settings.model_fields["grace_seconds"].default + EXIT_SECONDS
    assert float(service["stop_grace_period"].removesuffix("s")) > grace
    options = {variable.removeprefix("ATTENTION_").lower() for variable in service["environment"]}
    assert options <= Settings.model_fields.keys()
    assert "insecure" in options or {"tls_certificate", "tls_key"} <= options


def test_what_is_mounted_exists() -> None:
    volumes = [volume for service in SERVICES.values() for volume in service.get("volumes", ())]
    sources = [volume.split(":")[0] for volume in volumes if volume.startswith("./")]
    assert sources
    assert [source for source in sources if not (ROOT / source).exists()] == []


def test_prometheus_scrapes_the_server_under_the_job_name_of_the_rules() -> None:
    configuration = yaml.safe_load((ROOT / "deploy/compose/prometheus.yml").read_text())
    (scrape,) = configuration["scrape_configs"]
    (discovery,) = scrape["dns_sd_configs"]
    assert (scrape["job_name"], discovery["names"], discovery["port"]) == ("attention", ["server"], 8002)
    assert "ATTENTION_METRICS_PORT=8002" in DOCKERFILE


def test_envoy_asks_for_a_service_that_the_server_reports() -> None:
    (cluster,) = yaml.safe_load((ROOT / "deploy/envoy/envoy.yaml").read_text())["static_resources"][
        "clusters"
    ]
    assert cluster["health_checks"][0]["grpc_health_check"]["service_name"] in REPORTED

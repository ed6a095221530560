"""A public address needs TLS, or the operator's word."""

from pathlib import Path

import pytest

from attention_serving.server.errors import BindError, ExposureError
from attention_serving.server.tls.files import check_exposure
from tests.server.test_settings import run_server

PUBLIC = ["0.0.0.0", "::", "[::]", "", "10.1.2.3", "0"]  # noqa: S104 - refused
LOOPBACK = ["127.0.0.1", "127.8.9.10", "::1", "[::1]", "localhost", "::ffff:127.0.0.1", "127.1"]


@pytest.mark.parametrize("host", PUBLIC)
def test_a_public_address_is_refused(host: str) -> None:
    with pytest.raises(ExposureError, match=r"--tls-certificate and --tls-key, or listen on 127.0.0.1, or"):
        check_exposure(host, encrypted=False, insecure=False)
    check_exposure(host, encrypted=True, insecure=False)
    check_exposure(host, encrypted=False, insecure=True)


@pytest.mark.parametrize("host", LOOPBACK)
def test_loopback_needs_nothing(host: str) -> None:
    check_exposure(host, encrypted=False, insecure=False)


def test_a_name_without_an_address_cannot_be_listened_on() -> None:
    with pytest.raises(BindError, match=r"cannot listen on nobody\.invalid: "):
        check_exposure("nobody.invalid", encrypted=False, insecure=False)


@pytest.mark.parametrize("workers", ["1", "2"])
def test_the_server_does_not_start(tmp_path: Path, workers: str) -> None:
    options = ["--model-repository", str(tmp_path), "--host=0.0.0.0", "--workers", workers]
    status, said = run_server(*options)
    assert status == 1
    assert "ERROR cannot serve reason='0.0.0.0 can be reached from other machines" in said
    assert "--insecure (ATTENTION_INSECURE=true)" in said


def test_the_server_starts_if_the_operator_accepts_it(tmp_path: Path) -> None:
    options = ["--model-repository", str(tmp_path), "--host=127.0.0.1", "--port=0", "--metrics-port=0"]
    status, said = run_server(*options, "--insecure")
    assert (status, "can be reached" in said) == (1, False)
    assert "does not contain a <name>/<version>/ folder" in said

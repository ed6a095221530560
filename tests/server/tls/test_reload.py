"""How renewed files are taken: the thread's look, done by the test."""

from pathlib import Path

import pytest

from attention_serving.server.observe.metrics import Metrics
from attention_serving.server.tls import watch
from attention_serving.server.tls.files import TlsFiles
from tests.support.certificates import HOUR, Authority, Mounted, Pair, key_pem, new_key

AUTHORITY = Authority()


class Watching:
    """A reloader, its metrics, and the files that it looks at."""

    def __init__(self, folder: Path) -> None:
        metrics = Metrics()
        self.registry = metrics.registry
        self.mounted = Mounted(folder / "tls", AUTHORITY.issue(), AUTHORITY.pem)
        mounted = self.mounted
        files = TlsFiles(certificate=mounted.certificate, key=mounted.key, client_ca=mounted.ca)
        self.reloader = watch(files, metrics.reloaded)
        metrics.certificates_in_use(self.reloader.value)

    @property
    def counted(self) -> tuple[float | None, float | None]:
        """Changes that were taken, and that could not be."""
        name = "attention_tls_reloads_total"
        ok, failed = (self.registry.get_sample_value(name, {"result": each}) for each in ("ok", "failed"))
        return ok, failed

    def expiry(self, certificate: str) -> float | None:
        name = "attention_tls_certificate_expiry_timestamp_seconds"
        return self.registry.get_sample_value(name, {"certificate": certificate})

    def looks(self, count: int) -> None:
        for _ in range(count):
            self.reloader.look()


@pytest.fixture
def watching(tmp_path: Path) -> Watching:
    return Watching(tmp_path)


def test_a_changed_link_is_taken_at_once(watching: Watching) -> None:
    first = watching.reloader.value
    assert (watching.counted, watching.expiry("server")) == ((0, 0), first.expires.timestamp())
    renewed = AUTHORITY.issue(ends=3 * HOUR)
    watching.mounted.write(renewed, AUTHORITY.pem)
    watching.looks(1)
    found = watching.reloader.value
    assert found.contents.certificate == renewed.certificate
    assert watching.counted == (1, 0)
    assert watching.expiry("server") == found.expires.timestamp()
    watching.looks(2)
    assert watching.counted == (1, 0)


def test_renewed_authorities_are_taken(watching: Watching) -> None:
    other = Authority("other", ends=5 * HOUR)
    watching.mounted.write(AUTHORITY.issue(), other.pem)
    watching.looks(1)
    found = watching.reloader.value
    assert found.client_ca == other.pem
    assert found.client_ca_expires is not None
    assert watching.expiry("client_ca") == found.client_ca_expires.timestamp()


@pytest.mark.parametrize(
    "pair",
    [
        AUTHORITY.issue(ends=-HOUR),
        Pair(AUTHORITY.issue().certificate, key_pem(new_key())),
        Pair(b"", b""),
    ],
    ids=["expired", "other key", "empty"],
)
def test_a_pair_that_cannot_be_used_changes_nothing_and_is_reported_once(
    watching: Watching, pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    first = watching.reloader.value
    watching.mounted.write(pair, AUTHORITY.pem)
    watching.looks(4)
    assert watching.reloader.value is first
    assert watching.counted == (0, 1)
    warnings = [record for record in caplog.records if record.levelname == "WARNING"]
    assert [record.message for record in warnings] == ["not reloaded; what is in use is kept"]
    watching.mounted.write(AUTHORITY.issue(), AUTHORITY.pem)
    watching.looks(1)
    assert watching.reloader.value is not first
    assert watching.counted == (1, 1)


def test_a_pair_that_is_written_in_two_steps_is_not_reported(watching: Watching) -> None:
    renewed = AUTHORITY.issue()
    contents = watching.reloader.value.contents
    watching.mounted.write(Pair(renewed.certificate, contents.key), AUTHORITY.pem)
    watching.looks(1)
    watching.mounted.write(renewed, AUTHORITY.pem)
    watching.looks(1)
    assert watching.reloader.value.contents.key == renewed.key
    assert watching.counted == (1, 0)


def test_a_certificate_is_taken_once_it_is_valid(watching: Watching, monkeypatch: pytest.MonkeyPatch) -> None:
    early = AUTHORITY.issue(begins=HOUR, ends=3 * HOUR)
    watching.mounted.write(early, AUTHORITY.pem)
    watching.looks(2)
    assert watching.counted == (0, 1)
    # An hour later: what was refused is looked at again although it has not changed.
    monkeypatch.setattr("attention_serving.server.tls.certificates._check_valid_now", lambda *_: None)
    watching.looks(1)
    assert watching.reloader.value.contents.certificate == early.certificate
    assert watching.counted == (1, 1)

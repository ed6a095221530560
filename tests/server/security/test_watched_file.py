"""A file that changes while it is in use."""

import logging
from pathlib import Path

import pytest

from attention_serving.server.security.entries import digest_of
from attention_serving.server.security.errors import SecurityFileError
from tests.server.security.samples import entry, eventually, watched, write_tokens


class Reloads:
    """Records what was read again."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, bool]] = []

    def reloaded(self, what: str, *, success: bool) -> None:
        self.seen.append((what, success))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_tokens(tmp_path / "tokens.json", entry("one", "first", "read"))


def test_a_change_is_taken(path: Path) -> None:
    reloads = Reloads()
    file = watched(path, reloads)
    try:
        assert file.value.of_token(digest_of("first")) is not None
        write_tokens(path, entry("two", "second", "read"))
        assert eventually(lambda: file.value.of_token(digest_of("second")) is not None)
        assert file.value.of_token(digest_of("first")) is None
        assert eventually(lambda: reloads.seen == [("tokens", True)])
    finally:
        file.close()


@pytest.mark.parametrize("damage", ["{", '{"identities": [{"name": "t0p-s3cret"}]}', None])
def test_a_bad_file_keeps_what_was_read_before(
    path: Path, damage: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    reloads = Reloads()
    file = watched(path, reloads)
    try:
        if damage is None:
            path.unlink()
        else:
            path.write_text(damage)
        assert eventually(lambda: ("tokens", False) in reloads.seen)
        assert file.value.of_token(digest_of("first")) is not None
        assert "file not reloaded" in caplog.text
        assert "t0p-s3cret" not in caplog.text
        write_tokens(path, entry("two", "second", "read"))
        assert eventually(lambda: file.value.of_token(digest_of("second")) is not None)
    finally:
        file.close()


def test_a_bad_file_at_the_start_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SecurityFileError, match="cannot be read"):
        watched(tmp_path / "absent.json")


def test_a_file_that_others_may_change_is_reported(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path.chmod(0o666)
    watched(path).close()
    assert "other users may change the file" in caplog.text

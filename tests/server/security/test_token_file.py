"""The tokens file: what is accepted, what is refused without showing a secret, and how it is written."""

import hmac
import json
import os
import stat
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from attention_serving.server.errors import IdentityError
from attention_serving.server.security.rights import Source
from attention_serving.server.security.token_file import (
    Entry,
    TokenFile,
    TokenTable,
    digest_of,
    new_token,
    read_file,
    write_file,
)
from tests.server.security.samples import entry, table_in, write_tokens

HASH = digest_of("secret").hex()


def table_of(*entries: dict[str, Any]) -> TokenTable:
    return TokenTable([Entry.model_validate(fields) for fields in entries])


def test_a_token_finds_its_identity() -> None:
    table = table_of(entry("one", "first", "infer:a"), entry("two", "second", "admin", max_calls=7))
    found = table.of_token(digest_of("second"))
    assert found is not None
    assert (found.name, found.source, found.rights.admin) == ("two", Source.TOKEN, True)
    assert (found.limits.max_calls, found.limits.max_bytes) == (7, 0)
    assert found.caller.name == "token:two"
    assert table.of_token(digest_of("third")) is None


def test_a_certificate_finds_its_identity() -> None:
    table = table_of(
        entry("jobs", None, "read", certificate="spiffe://a/jobs"), entry("one", "first", "read")
    )
    found = table.of_certificate(["CN", "spiffe://a/jobs"])
    assert found is not None
    assert (found.name, found.source) == ("jobs", Source.CERTIFICATE)
    assert table.of_certificate(["one"]) is None


class Untouchable(str):
    """A presented token that may be encoded, and that nothing may look into or compare."""

    __slots__ = ()

    def _refuse(self, *_: object) -> Any:
        raise AssertionError("the token itself was compared")

    __eq__ = __ne__ = __lt__ = __gt__ = __le__ = __ge__ = __contains__ = __getitem__ = _refuse
    startswith = endswith = find = index = _refuse
    __hash__ = _refuse


def test_a_presented_token_is_hashed_and_otherwise_not_touched() -> None:
    table = table_of(entry("one", "first", "read"))
    found = table.of_token(digest_of(Untouchable("first")))
    assert found is not None
    assert found.name == "one"
    assert table.of_token(digest_of(Untouchable("firs"))) is None


@pytest.mark.parametrize("token", ["first", "firsu", "", "x" * 5000])
def test_every_look_up_takes_the_same_steps(token: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[int, int]] = []
    real = hmac.compare_digest

    def compare(one: bytes, other: bytes) -> bool:
        compared.append((len(one), len(other)))
        return real(one, other)

    monkeypatch.setattr(hmac, "compare_digest", compare)
    table_of(entry("one", "first", "read"), entry("two", "second", "read")).of_token(digest_of(token))
    assert compared == [(32, 32)]


def test_a_file_that_others_may_change_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write_tokens(tmp_path / "tokens.json", entry("one", "first", "read"))
    path.chmod(0o666)
    table_in(path)
    assert "other users may change the file" in caplog.text


def test_toml_and_json_are_read_alike(tmp_path: Path) -> None:
    toml, as_json = tmp_path / "tokens.toml", tmp_path / "tokens.json"
    toml.write_text(
        f'[[identities]]\nname = "one"\nsha256 = "{HASH}"\nexpires = 2027-01-31T00:00:00Z\n'
        'rights = ["infer:*"]\nmax_bytes = "1MiB"\n'
    )
    as_json.write_text(
        json.dumps(
            {
                "identities": [
                    {
                        "name": "one",
                        "sha256": HASH,
                        "expires": "2027-01-31T00:00:00Z",
                        "rights": ["infer:*"],
                        "max_bytes": 1 << 20,
                    }
                ]
            }
        )
    )
    assert read_file(toml) == read_file(as_json)
    identity = table_in(toml).of_token(digest_of("secret"))
    assert identity is not None
    assert identity.expires == datetime(2027, 1, 31, tzinfo=UTC).timestamp()
    assert identity.limits.max_bytes == 1 << 20


@pytest.mark.parametrize(
    ("content", "error"),
    [
        ("{", "is not JSON"),
        ("[]", "file: Input should be"),
        ("{}", "identities: Field required"),
        ({"identities": [entry("a b", "t", "read")]}, "identities[0].name: String should match"),
        ({"identities": [entry("a", "t", "write")]}, "identities[0].rights: 'write' is not a right"),
        ({"identities": [entry("a", None, "read")]}, "must have either sha256 or certificate"),
        (
            {"identities": [entry("a", "t", "read", certificate="c")]},
            "must have either sha256 or certificate",
        ),
        (
            {"identities": [entry("a", None, "read", sha256="t0p-s3cret")]},
            "identities[0].sha256: String should",
        ),
        ({"identities": [{**entry("a", None, "read"), "key": "t0p-s3cret"}]}, "identities[0].key: Extra"),
        ({"identities": [entry("a", "t", "read", expires="2027-01-31T00:00:00")]}, "identities[0].expires: "),
        ({"identities": [entry("a", "t", "read", queue_weight=0)]}, "identities[0].queue_weight: "),
        ({"identities": [entry("a", "t", "read"), entry("a", "u", "read")]}, "'a' is the name of more than"),
        ({"identities": [entry("a", "t", "read"), entry("b", "t", "read")]}, "a token is the sha256 of more"),
    ],
)
def test_a_wrong_file_is_refused_with_the_place_and_without_secrets(
    content: Any, error: str, tmp_path: Path
) -> None:
    path = tmp_path / "tokens.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(IdentityError) as raised:
        read_file(path)
    assert error in str(raised.value)
    assert str(path) in str(raised.value)
    assert "t0p-s3cret" not in str(raised.value)


def test_a_file_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(IdentityError, match="cannot be read: No such file"):
        read_file(tmp_path / "absent.json")


def test_a_file_is_replaced_whole_and_for_its_owner_only(tmp_path: Path) -> None:
    path = write_tokens(tmp_path / "tokens.json", entry("old", "t", "read"))
    path.chmod(0o644)
    before = path.stat().st_ino
    content = TokenFile(identities=(Entry(name="new", sha256=HASH, rights=("infer:a", "read")),))
    write_file(path, content)
    assert read_file(path) == content
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.stat().st_ino != before
    assert [file.name for file in tmp_path.iterdir()] == ["tokens.json"]


def test_a_write_that_fails_leaves_the_file_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_tokens(tmp_path / "tokens.json", entry("old", "t", "read"))

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(IdentityError, match="cannot be written: No space"):
        write_file(path, TokenFile(identities=()))
    assert [known.name for known in read_file(path).identities] == ["old"]
    assert [file.name for file in tmp_path.iterdir()] == ["tokens.json"]


def test_toml_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(IdentityError, match="TOML files are changed by hand"):
        write_file(tmp_path / "tokens.toml", TokenFile(identities=()))


def test_tokens_are_random_and_fit_a_header() -> None:
    tokens = {new_token() for _ in range(100)}
    assert len(tokens) == 100
    assert {len(token) for token in tokens} == {43}

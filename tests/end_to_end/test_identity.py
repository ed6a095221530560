"""Rights with real processes: the command, the client, rotated keys, several workers, errors at the start."""

import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
import pytest
from attention_client import AttentionClient, PermissionDeniedError, UnauthenticatedError

from attention_serving.server.security.peers import forward
from scripts.local_server import ServerProcess, serving, start
from tests.server.samples import ROOT, SELF
from tests.server.security.samples import (
    AUDIENCE,
    ISSUER,
    entry,
    eventually,
    key_set,
    public_jwk,
    signed,
    write_tokens,
)

QUERY = np.ones((3, 4), np.float32)
JWT = (f"--jwt-issuer={ISSUER}", f"--jwt-audience={AUDIENCE}")


def tokens(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "server.tokens", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


def attend(server: ServerProcess, token: str | None) -> tuple[int, ...]:
    with AttentionClient(server.target, token=token, timeout=60) as client:
        return tuple(client.attend(SELF, QUERY).context_vectors.shape)


def is_accepted(server: ServerProcess, token: str) -> bool:
    try:
        attend(server, token)
    except UnauthenticatedError:
        return False
    return True


def test_a_token_from_its_creation_to_its_end(artifacts: Path, tmp_path: Path) -> None:
    file = tmp_path / "tokens.json"
    first = tokens("create", "first", "--file", str(file), "--right", f"infer:{SELF}")
    with serving(artifacts, tmp_path / "log", f"--tokens={file}") as server:
        assert attend(server, first) == (3, 4)
        with pytest.raises(UnauthenticatedError) as unknown:
            attend(server, None)
        assert unknown.value.reason == "CREDENTIALS_MISSING"
        with (
            AttentionClient(server.target, token=first) as client,
            pytest.raises(PermissionDeniedError) as denied,
        ):
            client.models()
        assert denied.value.reason == "RIGHT_MISSING"
        second = tokens("create", "second", "--file", str(file), "--right", "infer:*")
        assert eventually(lambda: is_accepted(server, second))
        tokens("revoke", "first", "--file", str(file))
        assert eventually(lambda: not is_accepted(server, first))
        assert attend(server, second) == (3, 4)
        log = server.log.read_text()
    assert not [token for token in (first, second) if token in log]


def test_web_tokens_of_a_file_whose_keys_are_rotated(artifacts: Path, tmp_path: Path) -> None:
    keys = tmp_path / "jwks.json"
    keys.write_bytes(key_set(public_jwk("ES256")))
    options = (f"--jwt-jwks={keys}", *JWT)
    with serving(artifacts, tmp_path / "log", *options) as server:
        old, new = signed("ES256"), signed("ES256", key="two")
        assert attend(server, old) == (3, 4)
        assert not is_accepted(server, new)
        temporary = tmp_path / "new"
        temporary.write_bytes(key_set(public_jwk("ES256", "two")))
        temporary.replace(keys)
        assert eventually(lambda: is_accepted(server, new))
        assert not is_accepted(server, old)


def test_every_worker_checks_and_so_do_their_metrics(artifacts: Path, tmp_path: Path) -> None:
    file = write_tokens(tmp_path / "tokens.json", entry("one", "token", "infer:*", "read"))
    options = (f"--tokens={file}", "--workers=2", "--protect-metrics")
    with serving(artifacts, tmp_path / "log", *options) as server:
        for _ in range(8):  # each a connection of its own, to either worker
            assert attend(server, "token") == (3, 4)
            assert not is_accepted(server, "wrong")
        url = f"http://127.0.0.1:{server.metrics_port}/metrics"
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(url, timeout=60)
        assert refused.value.code == 401
        refused.value.close()
        asked = urllib.request.Request(url, headers={"Authorization": "Bearer token"})
        with urllib.request.urlopen(asked, timeout=60) as answer:  # noqa: S310 - http on loopback
            assert b"attention_workers" in answer.read()


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(
    ("option", "error"),
    [
        ("--tokens={folder}/absent.json", "cannot be read: No such file"),
        ("--tokens={folder}/bad.json", "identities[0].rights: 'write' is not a right"),
        ("--jwt-jwks={folder}/absent.json", "cannot be read: No such file"),
        ("--jwt-jwks=http://issuer.example/keys", "must begin with https://"),
    ],
)
def test_a_bad_file_at_the_start_ends_the_server(
    artifacts: Path, tmp_path: Path, option: str, error: str, workers: int
) -> None:
    write_tokens(tmp_path / "bad.json", entry("one", "token", "write"))
    options = (option.format(folder=tmp_path), f"--workers={workers}", *JWT)
    process = start(artifacts, tmp_path / "log", *options)
    assert process.wait(timeout=120) == 1
    assert error in (tmp_path / "log").read_text()


def test_keys_without_an_issuer_are_an_error_of_the_settings(artifacts: Path, tmp_path: Path) -> None:
    process = start(artifacts, tmp_path / "log", "--jwt-jwks=keys.json", "--jwt-issuer=i")
    assert process.wait(timeout=120) == 2
    assert "--jwt-jwks keys.json: needs jwt_issuer and jwt_audience" in (tmp_path / "log").read_text()


def test_an_expiring_web_token_is_refused_when_it_has_expired(artifacts: Path, tmp_path: Path) -> None:
    keys = tmp_path / "jwks.json"
    keys.write_bytes(key_set(public_jwk("ES256")))
    with serving(artifacts, tmp_path / "log", f"--jwt-jwks={keys}", *JWT) as server:
        token = signed("ES256", exp=time.time() - 20)  # within the leeway of 30 seconds, for ten more
        assert is_accepted(server, token)
        assert eventually(lambda: not is_accepted(server, token))
        with pytest.raises(UnauthenticatedError) as refused:
            attend(server, token)
        assert refused.value.reason == "TOKEN_EXPIRED"


@pytest.mark.parametrize("address", ["port", "socket"])
def test_nobody_but_the_http_process_may_name_another(artifacts: Path, tmp_path: Path, address: str) -> None:
    job = {"name": "job", "certificate": "spiffe://trial/job", "rights": [f"infer:{SELF}"]}
    file, socket = write_tokens(tmp_path / "tokens.json", job), tmp_path / "socket"
    options = (f"--tokens={file}", f"--unix-socket={socket}")
    with serving(artifacts, tmp_path / "log", *options) as server:
        target = server.target if address == "port" else f"unix:{socket}"
        forged = [forward(["spiffe://trial/job"])]
        with (
            AttentionClient(target, metadata=forged, timeout=60) as client,
            pytest.raises(UnauthenticatedError) as refused,
        ):
            client.attend(SELF, QUERY)
        assert refused.value.reason == "CREDENTIALS_MISSING"

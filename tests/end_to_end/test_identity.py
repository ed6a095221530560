"""Rights with real processes: the command, the client, rotated keys, protected metrics."""

import urllib.error
from pathlib import Path

import numpy as np
import pytest
from attention_client import AttentionClient, PermissionDeniedError, UnauthenticatedError

from scripts.local_server import ServerProcess, serving
from tests.server.samples import SELF
from tests.server.seams import wait_until
from tests.support.processes import run_python
from tests.support.prometheus import page


def tokens(*arguments: str) -> str:
    done = run_python("-m", "server.tokens", *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def is_accepted(server: ServerProcess, token: str) -> bool:
    with AttentionClient(server.target, token=token, timeout=60) as client:
        try:
            return bool(client.attend(SELF, np.ones((3, 4), np.float32)).context_vectors.shape == (3, 4))
        except UnauthenticatedError:
            return False


def test_a_token_from_its_creation_to_its_end(artifacts: Path, tmp_path: Path) -> None:
    file = tmp_path / "tokens.json"
    first = tokens("create", "first", "--file", str(file), "--right", f"infer:{SELF}")
    options = (f"--tokens={file}", "--protect-metrics", "--log-requests=failed", "--http-port=0")
    with serving(artifacts, tmp_path / "log", *options) as server:
        for port in (server.metrics_port, server.http_port):
            with pytest.raises(urllib.error.HTTPError, match="401"):
                page(port)
        assert is_accepted(server, first)
        with AttentionClient(server.target, token=first) as client, pytest.raises(PermissionDeniedError):
            client.models()
        second = tokens("create", "second", "--file", str(file), "--right", "infer:*")
        wait_until(lambda: is_accepted(server, second))
        tokens("revoke", "first", "--file", str(file))
        wait_until(lambda: not is_accepted(server, first))
        assert is_accepted(server, second)
        log = server.log.read_text()
    assert not [token for token in (first, second) if token in log]
    (refused,) = [line for line in log.splitlines() if "ListModels" in line]
    assert "code=PERMISSION_DENIED" in refused
    assert "caller=token:first" in refused

"""Which provider a process uses: the choice, its reason in the log, and the refusal at startup."""

import logging
import subprocess
import sys
from pathlib import Path

import onnxruntime
import pytest

from attention_serving.server.application import resolve
from attention_serving.server.errors import DeviceError
from attention_serving.server.settings import Settings
from tests.server.samples import ROOT

pytestmark = pytest.mark.skipif(
    "CUDAExecutionProvider" in onnxruntime.get_available_providers(), reason="this runtime has CUDA"
)
REASON = "is built without CUDA; install onnxruntime-gpu in its place"


def settings(provider: str) -> Settings:
    return Settings.model_validate({"model_repository": "r", "provider": provider})


def test_auto_takes_the_host_and_logs_why(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert resolve(given := settings("cpu")) is given
    assert not caplog.records
    found = resolve(settings("auto"))
    assert (found.provider, found.device.provider) == ("cpu", "cpu")
    (record,) = caplog.records
    fields = vars(record)
    assert (record.message, fields["provider"], fields["asked"]) == ("execution provider", "cpu", "auto")
    assert REASON in fields["reason"]


def test_cuda_that_cannot_be_used_is_an_error_with_the_reason() -> None:
    with pytest.raises(DeviceError, match=f"--provider cuda: .*{REASON}"):
        resolve(settings("cuda"))


@pytest.mark.thorough
def test_a_server_that_is_to_use_cuda_does_not_start_without(artifacts: Path) -> None:
    options = [f"--model-repository={artifacts}", "--port=0", "--metrics-port=0", "--provider=cuda"]
    command = [sys.executable, "-m", "server", *options]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 1
    last = ended.stderr.splitlines()[-1]
    assert " ERROR cannot serve reason=" in last
    assert REASON in last
    assert " loading " not in ended.stderr

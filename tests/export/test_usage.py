"""`python -m export`: options that contradict each other, or that are missing."""

import pytest
from typer.testing import CliRunner

from attention_serving.export.__main__ import app

PRESET, CHECKPOINT = ["multi-head-64x4", "--out", "models"], ["--weights", "a.safetensors", "--out", "models"]
BERT = [*CHECKPOINT, "--layout", "bert", "--heads", "2"]


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ([*PRESET, "--causal"], "--causal needs --weights"),
        ([*PRESET, "--heads", "8"], "--heads needs --weights"),
        ([*PRESET, "--rotary-theta", "0"], "--rotary-theta needs --weights"),
        (["multi-head-64x4", "--layout", "bert", "--describe"], "--layout needs --weights"),
        ([*BERT, "multi-head-64x4"], "give one of them"),
        ([*BERT, "--name", "a", "--seed", "0"], "--seed needs a preset"),
        ([*BERT, "--name", "a", "--rotary-theta", "3"], "layout 'bert' has no rotary embedding"),
        ([*CHECKPOINT, "--layout", "bert"], "--heads is missing"),
        ([*CHECKPOINT, "--heads", "2"], "--layout is missing: give one of bert, clip, generic"),
        (
            [*CHECKPOINT, "--heads", "2", "--layout", "t5"],
            "layout 't5' does not exist; the layouts are: bert",
        ),
        (BERT, "--name is missing"),
        (["self-attention"], "--out is missing"),
        ([], "name a preset (--list shows them), or give --weights"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_wrong_usage_ends_with_status_2_and_one_line(arguments: list[str], part: str) -> None:
    done = CliRunner().invoke(app, arguments)
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert part in done.stderr

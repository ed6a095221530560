"""An unmodified tritonclient: its methods work, or are refused with a reason."""

from base64 import b64encode
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attention_client import AttentionClient

from scripts.local_server import ServerProcess
from tests.support import triton
from tests.support.eager import Array
from tests.support.processes import serving_models

MODEL = "multi-head-64x4"
WRONG_WIDTH = "rows are 7 wide; the model takes 64"


@pytest.fixture
def ask(server: ServerProcess) -> Callable[..., Any]:
    """Calls a method of the client."""
    return partial(triton.ask, server.target)


def query(length: int, width: int = 64) -> Array:
    return np.random.default_rng(0).standard_normal((1, length, width), np.float32)


def test_a_stream(server: ServerProcess, client: AttentionClient) -> None:
    queries = [query(3), query(5, width=7), query(400), query(2)]
    found = triton.in_another_process(triton.stream, server.target, MODEL, queries)
    assert WRONG_WIDTH in found.pop(1)
    assert [(request_id, final) for request_id, _, final in found] == [("0", True), ("2", True), ("3", True)]
    for (_, context, _), at in zip(found, (0, 2, 3), strict=True):
        np.testing.assert_array_equal(context, client.attend(MODEL, queries[at]).context_vectors)


ANSWERS = [
    ("is_server_live", [], "True"),
    ("is_server_ready", [], "True"),
    ("is_model_ready", [MODEL], "True"),
    ("is_model_ready", [MODEL, "2"], "False"),
    ("get_server_metadata", [], "'name': 'attention-serving'"),
    ("get_model_metadata", [MODEL], "{'name': 'query', 'datatype': 'FP32', 'shape': ['-1', '-1', '64']}"),
    ("get_model_config", [MODEL], "{'name': 'query', 'data_type': 'TYPE_FP32', 'dims': ['-1', '64']}"),
    ("get_model_config", [MODEL], "'max_batch_size': 4096"),
    ("get_model_repository_index", [], f"{{'name': '{MODEL}', 'version': '1', 'state': 'READY'}}"),
    ("load_model", [MODEL], "start the server with --model-control explicit"),
    ("unload_model", [MODEL], "start the server with --model-control explicit"),
    ("get_log_settings", [], "'log_verbose_level': {'uint32_param': 0}"),
    ("get_trace_settings", [], "'trace_level': {'value': ['OFF']}"),
    ("update_trace_settings", [None, {"trace_level": ["TIMESTAMPS"]}], "trace_level]: cannot be changed"),
    ("update_log_settings", [{"log_file": "x"}], "log_file]: cannot be changed while the server runs"),
    ("get_system_shared_memory_status", [], "{}"),
    ("register_system_shared_memory", ["r", "/r", 8], "UNIMPLEMENTED: shared memory is switched off"),
    ("get_cuda_shared_memory_status", [], "{}"),
    ("register_cuda_shared_memory", ["r", b64encode(b"x"), 0, 8], "UNIMPLEMENTED: CUDA shared memory is not"),
]


@pytest.mark.parametrize(("method", "arguments", "expected"), ANSWERS)
def test_a_method_answers_or_is_refused_with_a_reason(
    ask: Callable[..., Any], method: str, arguments: list[Any], expected: str
) -> None:
    is_json = method.startswith("get_")
    assert expected in str(ask(method, *arguments, **({"as_json": True} if is_json else {})))


def test_statistics_count_what_was_done(client: AttentionClient, ask: Callable[..., Any]) -> None:
    client.attend(MODEL, [query(4)[0] for _ in range(6)])
    models = ask("get_inference_statistics", as_json=True)["model_stats"]
    found = {model["name"]: model for model in models}[MODEL]
    stats, sequences = found["inference_stats"], int(found["inference_count"])
    runs = [(int(run["batch_size"]), int(run["compute_infer"]["count"])) for run in found["batch_stats"]]
    assert 6 <= int(stats["queue"]["count"]) == sequences
    assert sum(size * count for size, count in runs) == sequences
    assert 0 < sum(count for _, count in runs) == int(found["execution_count"])
    assert int(stats["compute_infer"]["ns"]) > 0
    assert int(found["last_inference"]) > 1_600_000_000_000


@pytest.mark.thorough
def test_tensors_in_shared_memory(repository: Path, tmp_path: Path) -> None:
    with serving_models(tmp_path, [repository / MODEL], "--allow-shared-memory") as server:
        found, sent = triton.in_another_process(triton.shared, server.target, MODEL, query(9))
        with AttentionClient(server.target) as client:
            expected = client.attend(MODEL, query(9)).context_vectors
    np.testing.assert_array_equal(found, expected)
    assert sent == [b""]

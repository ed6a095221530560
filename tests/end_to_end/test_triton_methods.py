"""Every public method of an unmodified tritonclient: it works, or it is refused with a reason."""

import re
from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path
from shutil import copytree
from typing import Any

import numpy as np
import pytest
from attention_client import AttentionClient

from scripts.local_server import ServerProcess, serving
from tests.support import triton, triton_methods
from tests.support.triton import Array, in_another_process

MODEL = "multi-head-64x4"


def ask(server: ServerProcess, method: str, *arguments: Any, **options: Any) -> Any:
    return in_another_process(triton_methods.ask, server.target, method, *arguments, **options)


def query(length: int, seed: int = 0, width: int = 64) -> Array:
    return np.random.default_rng(seed).standard_normal((1, length, width), np.float32)


def test_a_model_is_ready_and_an_unknown_one_is_not(server: ServerProcess) -> None:
    assert ask(server, "is_model_ready", MODEL) is True
    assert ask(server, "is_model_ready", MODEL, "2") is False
    assert ask(server, "is_model_ready", "nonesuch") is False


def test_a_stream_answers_in_order_and_an_error_does_not_end_it(
    server: ServerProcess, client: AttentionClient
) -> None:
    queries = [query(3), query(5, width=7), query(400), query(2)]
    found = in_another_process(triton_methods.stream, server.target, MODEL, queries)
    assert "rows are 7 wide; the model takes 64" in found[1]
    for index in (0, 2, 3):
        request_id, context, final = found[index]
        assert (request_id, final) == (str(index), None)
        np.testing.assert_array_equal(context, client.attend(MODEL, queries[index]).context_vectors)


def test_a_stream_marks_the_last_response_if_asked(server: ServerProcess) -> None:
    found = in_another_process(triton_methods.stream, server.target, MODEL, [query(3)], wants_final=True)
    assert found[0][2] is True


def test_the_client_of_asyncio(server: ServerProcess, client: AttentionClient) -> None:
    queries = [query(3), query(5, width=7), query(2)]
    found = in_another_process(triton_methods.in_asyncio, server.target, MODEL, queries)
    expected = client.attend(MODEL, queries[0]).context_vectors
    assert (found["live"], found["ready"], found["unknown"]) == (True, True, False)
    assert (found["versions"], found["config"], found["statistics"]) == (["1"], MODEL, MODEL)
    assert found["index"] > 1
    assert found["logging"] == {"bool_param": True}
    np.testing.assert_array_equal(found["single"], expected)
    first, wrong, last = found["streamed"]
    np.testing.assert_array_equal(first[1], expected)
    assert "rows are 7 wide; the model takes 64" in wrong
    np.testing.assert_array_equal(last[1], client.attend(MODEL, queries[2]).context_vectors)


def test_an_asynchronous_request(server: ServerProcess, client: AttentionClient) -> None:
    _, context, _ = in_another_process(triton_methods.asynchronous, server.target, MODEL, query(6))
    np.testing.assert_array_equal(context, client.attend(MODEL, query(6)).context_vectors)


def test_a_configuration_says_how_many_sequences_a_request_may_hold(server: ServerProcess) -> None:
    config = ask(server, "get_model_config", MODEL, as_json=True)["config"]
    assert config["max_batch_size"] == 4096
    assert config["input"] == [{"name": "query", "data_type": "TYPE_FP32", "dims": ["-1", "64"]}]
    assert config["backend"] == "onnxruntime"
    assert config["dynamic_batching"] == {}


def test_statistics_count_what_was_done(server: ServerProcess) -> None:
    def statistics() -> dict[str, int]:
        (model,) = ask(server, "get_inference_statistics", MODEL, as_json=True)["model_stats"]
        stats = model["inference_stats"]
        found = {name: int(model[name]) for name in ("inference_count", "execution_count", "last_inference")}
        found |= {name: int(stats[name]["count"]) for name in ("success", "queue", "compute_infer")}
        runs = [(int(run["batch_size"]), int(run["compute_infer"]["count"])) for run in model["batch_stats"]]
        return found | {
            "sequences": sum(size * count for size, count in runs),
            "runs": sum(count for _, count in runs),
            "nanoseconds": int(stats["compute_infer"]["ns"]),
        }

    in_another_process(triton_methods.stream, server.target, MODEL, [query(5)])
    before = statistics()
    in_another_process(triton_methods.stream, server.target, MODEL, [query(4) for _ in range(7)])
    after = statistics()
    assert after["success"] - before["success"] == 7
    assert after["inference_count"] - before["inference_count"] == 7
    assert after["compute_infer"] - before["compute_infer"] == 7
    assert after["sequences"] == after["inference_count"] == after["queue"]
    assert after["runs"] == after["execution_count"]
    assert before["execution_count"] < after["execution_count"] <= before["execution_count"] + 7
    assert after["nanoseconds"] > before["nanoseconds"]
    assert after["last_inference"] >= before["last_inference"] > 1_600_000_000_000


def test_statistics_of_all_models_and_of_none(server: ServerProcess) -> None:
    names = {model["name"] for model in ask(server, "get_inference_statistics", as_json=True)["model_stats"]}
    assert {MODEL, "cross-768x12"} <= names
    assert "StatusCode.NOT_FOUND: model 'nonesuch'" in ask(server, "get_inference_statistics", "nonesuch")


def test_the_index_lists_the_repository(server: ServerProcess) -> None:
    models = ask(server, "get_model_repository_index", as_json=True)["models"]
    assert {"name": MODEL, "version": "1", "state": "READY"} in models


def test_loading_is_refused_unless_it_is_switched_on(server: ServerProcess) -> None:
    for method in ("load_model", "unload_model"):
        assert "start the server with --model-control explicit" in ask(server, method, MODEL)


def test_log_settings_change_the_level(server: ServerProcess) -> None:
    def settings(**changes: Any) -> Any:
        method = "update_log_settings" if changes else "get_log_settings"
        arguments = [changes] if changes else []
        return ask(server, method, *arguments, as_json=True)["settings"]

    assert settings()["log_verbose_level"] == {"uint32_param": 0}
    verbose = settings(log_verbose_level=1)
    assert verbose["log_verbose_level"] == {"uint32_param": 1}
    ask(server, "is_server_live")
    assert "call ended" in server.log.read_text()
    quiet = settings(log_verbose_level=0, log_info=False)
    assert quiet["log_info"] == {"bool_param": False}
    assert settings(log_info=True)["log_info"] == {"bool_param": True}
    refused = ask(server, "update_log_settings", {"log_file": "/tmp/x"})  # noqa: S108
    assert "settings[log_file]: cannot be changed while the server runs" in refused


def test_traces_are_off_and_stay_off(server: ServerProcess) -> None:
    found = ask(server, "get_trace_settings", as_json=True)["settings"]
    assert found["trace_level"] == {"value": ["OFF"]}
    refused = ask(server, "update_trace_settings", settings={"trace_level": ["TIMESTAMPS"]})
    assert "settings[trace_level]: cannot be changed" in refused


def test_shared_memory_is_off_unless_it_is_switched_on(server: ServerProcess) -> None:
    assert ask(server, "get_system_shared_memory_status", as_json=True) == {}
    refused = ask(server, "register_system_shared_memory", "r", "/r", 8)
    assert refused.startswith("StatusCode.UNIMPLEMENTED: shared memory is switched off")
    assert ask(server, "get_cuda_shared_memory_status", as_json=True) == {}
    refused = ask(server, "register_cuda_shared_memory", "r", b64encode(b"handle"), 0, 8)
    assert refused.startswith("StatusCode.UNIMPLEMENTED: CUDA shared memory is not supported")


@pytest.fixture(scope="module")
def sharing(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server of one model, with shared memory."""
    folder = tmp_path_factory.mktemp("sharing")
    copytree(repository / MODEL, folder / "models" / MODEL)
    with serving(folder / "models", folder / "log", "--allow-shared-memory") as server:
        yield server


def test_tensors_in_shared_memory(sharing: ServerProcess) -> None:
    found = in_another_process(triton_methods.shared, sharing.target, MODEL, query(9), 64)
    with AttentionClient(sharing.target) as client:
        expected = client.attend(MODEL, query(9)).context_vectors
    np.testing.assert_array_equal(found["found"], expected)
    assert found["raw"] == [b""]
    assert (found["regions"], found["left"]) == (["in", "out"], ["out"])
    assert "system_shared_memory" in ask(sharing, "get_server_metadata", as_json=True)["extensions"]


def test_every_public_method_is_tried() -> None:
    """Also those that are used inside, such as `start_stream`."""
    files = [Path(__file__), *(Path(module.__file__ or "") for module in (triton_methods, triton))]
    used = set(re.findall(r"\w+", "".join(file.read_text() for file in files)))
    methods = in_another_process(triton_methods.public_methods)
    assert "infer" in methods
    assert set(methods) - used == set()

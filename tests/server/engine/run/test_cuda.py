"""Whether CUDA can be used, and if not, why. This machine's runtime has no CUDA, unless a test says so."""

import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper

from attention_serving.server.engine.run import cuda
from attention_serving.server.engine.run.cuda import (
    DIAGNOSIS_SECONDS,
    PROBE,
    find_device,
    load_error,
    runtime_log,
    why_not,
)
from attention_serving.server.engine.run.provider import Provider, ProviderError

WITHOUT_CUDA = pytest.mark.skipif(
    "CUDAExecutionProvider" in onnxruntime.get_available_providers(), reason="this runtime has CUDA"
)
# From public reports of users of ONNX Runtime 1.29 and 1.30, shortened to one line for each event.
MISSING_LIBRARY = """\
2026-08-20 10:00:00.000000000 [E:onnxruntime:Default, provider_bridge_ort.cc:2395 TryGetProviderInfo_CUDA] Failed to load library libonnxruntime_providers_cuda.so with error: libcublasLt.so.13: cannot open shared object file: No such file or directory
2026-08-20 10:00:00.000000000 [W:onnxruntime:Default, onnxruntime_pybind_state.cc:1139 CreateExecutionProviderFactoryInstance] Failed to create CUDAExecutionProvider. Require cuDNN 9.* and CUDA 13.*. Please install all dependencies.
"""  # noqa: E501
OLD_DRIVER = "CUDA failure 35: CUDA driver version is insufficient for CUDA runtime version ; GPU=-1"
ONLY_THE_WARNING = MISSING_LIBRARY.splitlines()[1]


@WITHOUT_CUDA
def test_a_runtime_without_cuda_is_named_with_what_to_install() -> None:
    with pytest.raises(
        ProviderError, match=r"^onnxruntime 1\..* is built without CUDA; install onnxruntime-gpu"
    ):
        find_device()
    assert why_not().startswith("onnxruntime 1.")


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        (
            MISSING_LIBRARY,
            "libonnxruntime_providers_cuda.so with error: libcublasLt.so.13: cannot open shared object file:"
            " No such file or directory",
        ),
        (
            ONLY_THE_WARNING,
            "Failed to create CUDAExecutionProvider. Require cuDNN 9.* and CUDA 13.*. Please install all"
            " dependencies.",
        ),
        (f"[E:onnxruntime] {OLD_DRIVER}", OLD_DRIVER),
        ("UserWarning: something else", ""),
        ("", ""),
    ],
    ids=["missing library", "warning only", "old driver", "unrelated", "empty"],
)
def test_the_reason_is_read_from_the_log_of_the_runtime(log: str, expected: str) -> None:
    assert load_error(log) == expected


@WITHOUT_CUDA
def test_another_process_shows_what_the_runtime_logs() -> None:
    """The runtime without CUDA warns that it does not know the provider, which is not a load error."""
    log = runtime_log()
    assert "CUDAExecutionProvider" in log
    assert "Traceback" not in log
    assert load_error(log) == ""


def test_a_process_that_does_not_end_in_time_is_a_reason_too(monkeypatch: pytest.MonkeyPatch) -> None:
    assert DIAGNOSIS_SECONDS > 0
    monkeypatch.setattr(cuda, "DIAGNOSIS_SECONDS", 0.0)
    assert "timed out" in runtime_log()


def test_the_probe_is_an_addition_of_one_element() -> None:
    model = onnx.load_model_from_string(PROBE)
    onnx.checker.check_model(model, full_check=True)
    vectors = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in ("x", "y")]
    (node,) = model.graph.node
    assert node == helper.make_node("Add", ["x", "x"], ["y"])
    assert [*model.graph.input, *model.graph.output] == vectors


def test_the_probe_computes_on_every_provider(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here the host takes the place of the device: the same session, another provider."""
    monkeypatch.setattr(cuda, "CUDA", Provider.CPU.runtime)
    cuda._compute()


@WITHOUT_CUDA
def test_a_session_that_silently_runs_on_the_cpu_is_noticed() -> None:
    with pytest.raises(
        ProviderError, match=r"the libraries of CUDA do not load: .*; onnxruntime was built for CUDA"
    ):
        cuda._compute()

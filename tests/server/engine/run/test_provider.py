"""Execution providers: their options by name."""

from attention_serving.server.engine.run.provider import Device, Provider


def test_fp32_on_a_gpu_does_not_use_tf32() -> None:
    assert Device(Provider.CUDA).options["use_tf32"] == "0"


def test_the_memory_of_a_gpu_is_limited_only_if_asked_for() -> None:
    unlimited, limited = Device(Provider.CUDA).options, Device(Provider.CUDA, memory_bytes=5 << 30).options
    assert "gpu_mem_limit" not in unlimited
    assert limited == {
        **unlimited,
        "gpu_mem_limit": str(5 << 30),
        "arena_extend_strategy": "kSameAsRequested",
    }


def test_a_limit_of_device_memory_does_not_concern_the_host() -> None:
    assert Device(Provider.CPU, memory_bytes=5 << 30).options == {}

"""Which execution provider this process uses, and why."""

import logging

from attention_serving.server.engine.run import cuda
from attention_serving.server.engine.run.provider import Provider, ProviderError
from attention_serving.server.errors import DeviceError
from attention_serving.server.settings import Settings

log = logging.getLogger(__name__)


def resolve(settings: Settings) -> Settings:
    """The same settings with a provider that this machine has in place of auto. Logs the choice.

    Raises:
        DeviceError: CUDA was asked for and cannot be used; the message gives the reason.
    """
    if settings.provider == "cpu":
        return settings
    asked = settings.provider
    try:
        device = cuda.find_device()
    except ProviderError as error:
        if asked == "cuda":
            raise DeviceError(f"--provider {asked}: {error}") from error
        log.info("execution provider", extra={"provider": Provider.CPU, "asked": asked, "reason": str(error)})
        return settings.model_copy(update={"provider": Provider.CPU.value})
    log.info(
        "execution provider",
        extra={
            "provider": Provider.CUDA,
            "asked": asked,
            "device": device.name,
            "device_memory_bytes": device.memory_bytes,
            "compute_capability": device.compute_capability,
        },
    )
    return settings.model_copy(update={"provider": Provider.CUDA.value})

"""Reads the log of ONNX Runtime: which kernel computed the attention."""

import re
from collections import Counter

# At level VERBOSE, and with ORT_ENABLE_ATTENTION_KERNEL_DEBUG_INFO=1 in versions that print it.
_CHOSEN = re.compile(
    r"ONNX Attention: using (?P<sentence>[\w ]+?) \("
    r"|Attention: using (?P<unfused>unified unfused) path"
    r"|SdpaKernel=(?P<token>[A-Z_]+)"
)
NAMES = {
    "Flash Attention": "flash",
    "FLASH_ATTENTION": "flash",
    "cuDNN SDPA": "cuDNN",
    "cuDNN Flash Attention": "cuDNN",
    "CUDNN_FLASH_ATTENTION": "cuDNN",
    "Memory Efficient Attention": "memory-efficient",
    "EFFICIENT_ATTENTION": "memory-efficient",
    "Unfused Attention": "unfused",
    "unified unfused": "unfused",
    "MATH": "unfused",
}


def kernels(log: str) -> Counter[str]:
    """The kernels that the log names, and how often. A kernel that is not known here keeps its name there."""
    found = (next(filter(None, match.groups())) for match in _CHOSEN.finditer(log))
    return Counter(NAMES.get(name, name) for name in found)

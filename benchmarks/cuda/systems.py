"""Names of the systems that are measured in process. Apart, because the report must not load PyTorch."""

ONNX_HOST, ONNX_DEVICE = "ONNX Runtime, from the host", "ONNX Runtime, on the device"
TORCH_HOST, TORCH_DEVICE = "eager PyTorch, from the host", "eager PyTorch, on the device"

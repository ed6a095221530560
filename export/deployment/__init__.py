"""Files that other servers need beside an artifact, for `python -m export … --target`.

target       the targets by name, and where each expects its files
write        writes the files of one target, whole or not at all
triton       Triton's model configurations, in protobuf_text
torchserve   a model archive, with torchserve_handler.py and torchserve_config.yaml inside
onnx_file    one ONNX file with its weights, and sample_run.py
golden       golden vectors in the form that those two programs read with NumPy alone

torchserve_handler.py and sample_run.py run elsewhere: they import NumPy and ONNX Runtime, and nothing of this
repository.
"""

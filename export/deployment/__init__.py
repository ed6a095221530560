"""Files that other servers need beside an artifact, for `python -m export … --target`.

write        the targets by name, and their files: written whole or not at all
triton       Triton's model configurations
torchserve   a model archive, with torchserve_handler.py and torchserve_config.yaml inside

torchserve_handler.py and sample_run.py run elsewhere: they import NumPy and ONNX Runtime, and nothing of this
repository.
"""

#!/usr/bin/env bash
# Installs the server that tests of export targets run, below PEERS_HOME (default: ~/.cache/attention-peers):
#   triton      NVIDIA Triton Inference Server 2.51 with its Python backend, from the nvidia-pytriton wheel
# Usage: tests/support/install_peers.sh
set -euo pipefail

home=${PEERS_HOME:-$HOME/.cache/attention-peers}
mkdir -p "$home"
[ -x "$home/triton/bin/pip" ] || python3 -m venv "$home/triton"
"$home/triton/bin/pip" install --quiet --upgrade pip
"$home/triton/bin/pip" install --quiet nvidia-pytriton==0.7.0 onnxruntime
tree=$("$home/triton/bin/python" -c 'import pathlib, pytriton; print(pathlib.Path(pytriton.__file__).parent / "tritonserver")')
stub=$("$home/triton/bin/python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')/triton_python_backend_stub
cp "$tree/python_backend_stubs/$stub" "$tree/backends/python/"
chmod +x "$tree/backends/python/triton_python_backend_stub" "$tree/bin/tritonserver"
echo "triton: installed in $home/triton"

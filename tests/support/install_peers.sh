#!/usr/bin/env bash
# Installs the servers that tests of export targets run, below PEERS_HOME (default: ~/.cache/attention-peers), each in a folder of its own:
#   triton      NVIDIA Triton Inference Server 2.51 with its Python backend, from the nvidia-pytriton wheel
#   torchserve  TorchServe 0.12 and its archiver; needs a Java 17 runtime on the PATH
# Usage: tests/support/install_peers.sh [triton] [torchserve]      (default: all)
set -euo pipefail

home=${PEERS_HOME:-$HOME/.cache/attention-peers}
mkdir -p "$home"

make_environment() { # NAME
  [ -x "$home/$1/bin/pip" ] || python3 -m venv "$home/$1"
  "$home/$1/bin/pip" install --quiet --upgrade pip
}

install_triton() {
  make_environment triton
  "$home/triton/bin/pip" install --quiet nvidia-pytriton==0.7.0 onnxruntime
  local tree stub
  tree=$("$home/triton/bin/python" -c 'import pathlib, pytriton; print(pathlib.Path(pytriton.__file__).parent / "tritonserver")')
  stub=$("$home/triton/bin/python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')/triton_python_backend_stub
  cp "$tree/python_backend_stubs/$stub" "$tree/backends/python/"
  chmod +x "$tree/backends/python/triton_python_backend_stub" "$tree/bin/tritonserver"
}

install_torchserve() {
  make_environment torchserve
  "$home/torchserve/bin/pip" install --quiet torch==2.13.0 onnxruntime torchserve==0.12.0 torch-model-archiver==0.12.0 \
    captum pyyaml
}

[ $# -gt 0 ] || set -- triton torchserve
for peer in "$@"; do
  case $peer in
    triton | torchserve) "install_$peer" ;;
    *) echo "unknown peer: $peer; choose triton or torchserve" >&2; exit 2 ;;
  esac
  echo "$peer: installed in $home/$peer"
done

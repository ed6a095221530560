#!/usr/bin/env bash
# Installs the peers of the benchmark below PEERS_HOME (default: ~/.cache/attention-peers), each in a folder of its own:
#   triton      NVIDIA Triton Inference Server 2.51 with its Python backend, from the nvidia-pytriton wheel
#   torchserve  TorchServe 0.12 and its archiver; needs a Java 17 runtime on the PATH
#   perf        Triton's load generator perf_analyzer; needs libb64 (libb64-0d in Debian and Ubuntu)
# Usage: benchmarks/peers/install.sh [triton] [torchserve] [perf]      (default: all)
#
# No package has Triton's C++ ONNX Runtime backend. It is measured if TRITON_BACKENDS names a folder with
# onnxruntime/libtriton_onnxruntime.so and its libonnxruntime.so: /opt/tritonserver/backends of NVIDIA's container image
# of release 24.10, copied to this machine, or the result of a build for the same release of Triton.
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

install_perf() {
  make_environment perf
  "$home/perf/bin/pip" install --quiet tritonclient==2.41.0 nvidia-cuda-runtime-cu12
}

install_torchserve() {
  make_environment torchserve
  "$home/torchserve/bin/pip" install --quiet torch==2.13.0 onnxruntime torchserve==0.12.0 torch-model-archiver==0.12.0 \
    captum pyyaml
}

[ $# -gt 0 ] || set -- triton torchserve perf
for peer in "$@"; do
  case $peer in
    triton | torchserve | perf) "install_$peer" ;;
    *) echo "unknown peer: $peer; choose of triton, torchserve and perf" >&2; exit 2 ;;
  esac
  echo "$peer: installed in $home/$peer"
done

#!/usr/bin/env bash
# Installs the peers of the benchmark below PEERS_HOME (default: ~/.cache/attention-peers), each in a folder of its own:
#   triton              NVIDIA Triton Inference Server 2.51 with its Python backend, from the nvidia-pytriton wheel
#   triton-onnxruntime  Triton's C++ ONNX Runtime backend, which no package has: compiled in a minute from its public
#                       sources, with the ONNX Runtime of the Python backend; needs triton, git and a C++17 compiler
#   torchserve          TorchServe 0.12 and its archiver; needs a Java 17 runtime on the PATH
#   perf                Triton's load generator perf_analyzer; needs libb64 (libb64-0d in Debian and Ubuntu)
# Usage: benchmarks/peers/install.sh [triton] [triton-onnxruntime] [torchserve] [perf]      (default: all)
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

install_triton-onnxruntime() {
  local folder=$home/triton-onnxruntime release=r24.10 runtime version name
  runtime=$(echo "$home"/triton/lib/python3*/site-packages/onnxruntime/capi)
  version=$(echo "$runtime"/libonnxruntime.so.*)
  version=${version##*.so.}
  mkdir -p "$folder"
  for name in core common backend onnxruntime_backend; do
    clone "triton-inference-server/$name" "$release" "$folder/sources/$name"
  done
  clone Tencent/rapidjson master "$folder/sources/rapidjson"
  clone microsoft/onnxruntime "v$version" "$folder/sources/onnxruntime" include/onnxruntime/core/session
  local backend=$folder/backends/onnxruntime
  mkdir -p "$backend"
  (
    cd "$folder/sources"
    # device_memory_tracker.cc is for GPUs only.
    c++ -shared -fPIC -O3 -DNDEBUG -DTRITON_ENABLE_STATS -std=c++17 -w \
      -I core/include -I common/include -I backend/include -I rapidjson/include \
      -I onnxruntime/include/onnxruntime/core/session \
      onnxruntime_backend/src/*.cc common/src/{async_work_queue,error,thread_pool}.cc \
      backend/src/backend_{common,input_collector,memory,model,model_instance,output_responder}.cc \
      -Wl,--version-script=onnxruntime_backend/src/libtriton_onnxruntime.ldscript -Wl,-rpath,'$ORIGIN' \
      "$runtime/libonnxruntime.so.$version" -o "$backend/libtriton_onnxruntime.so"
  )
  cp "$runtime"/libonnxruntime*.so* "$backend"
  ln -sf "libonnxruntime.so.$version" "$backend/libonnxruntime.so.1"
}

clone() { # REPOSITORY BRANCH FOLDER [PATH]: the newest commit, or only a path of it; nothing if the folder is there
  [ -d "$3" ] && return
  git clone --quiet --depth 1 --filter=blob:none --no-checkout --branch "$2" "https://github.com/$1" "$3"
  [ $# -lt 4 ] || git -C "$3" sparse-checkout set "$4"
  git -C "$3" -c advice.detachedHead=false checkout --quiet
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

[ $# -gt 0 ] || set -- triton triton-onnxruntime torchserve perf
for peer in "$@"; do
  case $peer in
    triton | triton-onnxruntime | torchserve | perf) "install_$peer" ;;
    *) echo "unknown peer: $peer; choose of triton, triton-onnxruntime, torchserve and perf" >&2; exit 2 ;;
  esac
  echo "$peer: installed in $home/$peer"
done

#!/bin/sh
# Installs the packages of a lock file into /out/opt/venv: install.sh LOCK [OPTION OF finish.py]…
# Wheels in /dist are installed as well, and PyTorch's CPU build of /torch.txt: from /wheels, or by uv from PyTorch's index.
set -eu
lock=$1
shift
if [ -f /run/secrets/ca ]; then export PIP_CERT=/run/secrets/ca SSL_CERT_FILE=/run/secrets/ca; fi
python -m venv --without-pip /opt/venv
pip="python -m pip --python /opt/venv/bin/python install --no-compile --no-deps"
$pip --require-hashes --find-links /wheels --requirement "$lock"
if [ -f /torch.txt ]; then
    if ls /wheels/torch-*.whl; then
        $pip --require-hashes --no-index --find-links /wheels --requirement /torch.txt
    else
        /build/bin/uv pip install --python /opt/venv/bin/python --no-deps --torch-backend cpu --require-hashes --requirement /torch.txt
    fi
fi
if [ -d /dist ]; then $pip --no-index /dist/*.whl; fi
mkdir -p /out/opt
mv /opt/venv /out/opt/venv
exec python /image/finish.py /out --root /rootfs "$@"

#!/bin/sh
# Installs the packages of a lock file into /out/opt/venv: install.sh LOCK [OPTION OF finish.py]…
# Wheels in /dist are installed as well.
set -eu
lock=$1
shift
if [ -f /run/secrets/ca ]; then export PIP_CERT=/run/secrets/ca; fi
python -m venv --without-pip /opt/venv
pip="python -m pip --python /opt/venv/bin/python install --no-compile --no-deps"
$pip --require-hashes --find-links /wheels --requirement "$lock"
if [ -d /dist ]; then $pip --no-index /dist/*.whl; fi
mkdir -p /out/opt
mv /opt/venv /out/opt/venv
exec python /image/finish.py /out --root /rootfs "$@"

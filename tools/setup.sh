#!/bin/sh
# Make a virtual environment with FlashKernel and all it needs for tests. Usage: setup.sh FOLDER
# On a machine without a GPU the CPU build of torch is taken where the package index has one.
set -eu
venv=$1
test -x "$venv/bin/python" || "${PYTHON:-python3}" -m venv "$venv"
pip="$venv/bin/python -m pip --disable-pip-version-check"
if command -v nvidia-smi >/dev/null 2>&1; then
    torch="torch==2.11.0" # the release built for the triton that constraints.txt pins
else
    torch="torch==2.13.0+cpu"
fi
if ! "$venv/bin/python" -c "import torch" >/dev/null 2>&1; then
    echo "Installing $torch ..."
    $pip install -q -c constraints.txt "$torch" 2>/dev/null || {
        echo "The package index has no $torch; taking its default build of torch 2.13.0 instead."
        $pip install -q -c constraints.txt torch==2.13.0
    }
fi
echo "Installing FlashKernel and its test tools ..."
$pip install -q -c constraints.txt -e ".[cuda,hf,plot,test,lint]"

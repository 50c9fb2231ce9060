#!/bin/sh
# Make a virtual environment with FlashKernel and all it needs for tests. Usage: setup.sh FOLDER [newest|docs]
# On a machine without a GPU the CPU build of torch is taken where the package index has one.
# With "newest", add to the environment the newest triton that pyproject.toml allows, in FOLDER/newest: what runs with
# that folder in PYTHONPATH takes it instead of the pinned one.
# With "docs", add what builds the documentation.
set -eu
venv=$1
test -x "$venv/bin/python" || "${PYTHON:-python3}" -m venv "$venv"
pip="$venv/bin/python -m pip --disable-pip-version-check"
if [ "${2:-}" = newest ]; then
    allowed=$(sed -n "s/^ *\"\(triton[^;\"]*\).*/\1/p" pyproject.toml)
    echo "Installing the newest $allowed beside the pinned one ..."
    rm -rf "$venv/newest"
    $pip install -q --no-deps --target "$venv/newest" "$allowed"
    exit
fi
if [ "${2:-}" = docs ]; then
    echo "Installing what builds the documentation ..."
    $pip install -q -c constraints.txt -e ".[docs]"
    exit
fi
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
$pip install -q -c constraints.txt -e ".[all,test,lint]"

#!/bin/sh
# Install the server with the versions that are tested. Usage: install_server.sh system | FOLDER
# "system" takes the Python that is there, as a container image does; a folder gets a virtual environment, as CI does.
set -eu
where=$1
if [ "$where" = system ]; then
    python=python3
    # Triton compiles a launcher in C at the first start.
    if command -v apt-get >/dev/null 2>&1 && ! command -v gcc >/dev/null 2>&1; then
        apt-get update
        apt-get install --yes --no-install-recommends gcc libc6-dev
        rm -rf /var/lib/apt/lists/*
    fi
else
    test -x "$where/bin/python" || "${PYTHON:-python3}" -m venv "$where"
    python=$where/bin/python
fi
$python -m pip install --disable-pip-version-check --constraint constraints.txt ".[cuda,serve,grammar]"
$python -m flashkernel serve --help >/dev/null

#!/usr/bin/env bash
# Checks and timings for a GPU machine with nothing but torch and triton: see bench/gpu/.
#
#   bench/gpu.sh [--interpret] [--only SECTION ...]
#
# PYTHON picks the interpreter, OUT the folder for the JSON. Wheels put beside this file (peers
# such as liger_kernel) are unpacked for the run, without network and without their dependencies.
set -eu
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
shopt -s nullglob
wheels=(bench/*.whl)
if [ ${#wheels[@]} -gt 0 ]; then
  peers=$(mktemp -d)
  trap 'rm -rf "$peers"' EXIT
  if "$PYTHON" -m pip install --quiet --no-index --no-deps --target "$peers" "${wheels[@]}"; then
    export PYTHONPATH="$peers${PYTHONPATH:+:$PYTHONPATH}"
  fi
fi
"$PYTHON" -m bench.gpu "$@"

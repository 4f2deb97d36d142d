#!/usr/bin/env bash
# The first ten minutes on an accelerator: a short training run, parity of kernels with the plain formula, decoding speed with the
# stall of a weight swap, and MFU, as one JSON file (see on_hardware.py).
# Usage: benchmarks/on_hardware.sh [OUT.json]; PYTHON=python3 chooses an interpreter with areal_jax installed.
set -euo pipefail
out=$(realpath -m "${1:-on_hardware.json}")
cd "$(dirname "$0")/.."
exec "${PYTHON:-python3}" benchmarks/on_hardware.py "$out"

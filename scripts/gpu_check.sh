#!/usr/bin/env bash
# Everything that needs a Hopper GPU, in one command of at most 8 minutes, with nothing to download:
#
#     scripts/gpu_check.sh OUT          # or with $OUT set; on the GPU
#     scripts/gpu_check.sh --cpu OUT    # the same stages on tiny shapes, in Triton's interpreter
#
# PYTHON names the interpreter (default: python3). Exit codes: 0 all stages are ok, 1 one failed, 2 usage, 4 no GPU.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
exec "${PYTHON:-python3}" "$here/gpu_check.py" "$@"

#!/usr/bin/env bash
# Checks, then measures, beside torch where python3 has it. In a folder that bundle.sh made.
#
#   ./run.sh [OPTIONS OF float8-gpu bench]
#
# PYTHON: the Python with torch (python3). OUT: the folder for the results (this one). LIMIT: seconds for the measurements
# (480).
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
out=${OUT:-$here}
python=${PYTHON:-python3}

# Kernels are compiled on the machine: NVRTC and the CUDA headers must be found. Without a toolkit, the wheels of CUDA 13 that
# torch brings may do.
if [ -z "${CUDA_PATH:-}" ] && [ ! -d /usr/local/cuda/include ]; then
    find_wheels='import glob, importlib.util as u
spec = u.find_spec("nvidia")
roots = spec.submodule_search_locations if spec else []
print(next((f for root in roots for f in glob.glob(root + "/cu1*")), ""))'
    wheels=$("$python" -c "$find_wheels" 2>/dev/null || true)
    if [ -n "$wheels" ]; then
        export CUDA_PATH=$wheels LD_LIBRARY_PATH=$wheels/lib:${LD_LIBRARY_PATH:-}
    fi
fi
torch=()
if "$python" -c 'import torch' 2>/dev/null; then
    torch=(--torch "$python")
fi
# What is wrong does not keep the rest from being measured, but for a device that is not there (2).
status=0
"$here/float8-gpu" check || status=$?
[ "$status" != 2 ] || exit 2
"$here/float8-gpu" bench "${torch[@]}" --limit-seconds "${LIMIT:-480}" --json "$out/float8-gpu.json" "$@" || status=$?
exit "$status"

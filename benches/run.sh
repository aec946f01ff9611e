#!/usr/bin/env bash
# The first run on a GPU, in the order of FIRST_RUN.md: the most valuable things first, each with a limit, what is known written as
# it comes. In a folder that bundle.sh made.
#
#   ./run.sh [--minutes 10] [--device cuda|wgpu]
#
# CUDA_PATH: the toolkit (/usr/local/cuda, else the wheels beside torch). PYTHON: the Python with torch (python3). OUT: the folder for
# the results (this one): summary.txt, log.txt, check.jsonl, and a JSON file for each measurement. Exit code 0 if nothing that ran was
# wrong, whether or not all ran; 2 without a device; 64 for arguments that it does not take.
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd)
out=${OUT:-$here}
python=${PYTHON:-python3}
minutes=10 device=cuda
usage() {
    echo "usage: $0 [--minutes 10] [--device cuda|wgpu]" >&2
    exit 64
}
while [ $# -gt 0 ]; do
    case "$1" in
        --minutes) minutes=${2:-} ;;
        --device) device=${2:-} ;;
        *) usage ;;
    esac
    shift 2 || usage
done
[[ $minutes =~ ^[1-9][0-9]*$ && $device =~ ^(cuda|wgpu)$ ]] || usage
SECONDS=0
end=$((minutes * 60))
mkdir -p "$out"
: >"$out/summary.txt" >"$out/log.txt" >"$out/check.jsonl"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# The binary travels compressed.
gpu=$work/float8-gpu
"$python" -c 'import lzma, shutil, sys; shutil.copyfileobj(lzma.open(sys.argv[1]), open(sys.argv[2], "wb"))' \
    "$here/float8-gpu.xz" "$gpu" || exit 1
chmod +x "$gpu"

# Kernels are compiled on the machine: NVRTC and the CUDA headers must be found. Without a toolkit, the wheels of CUDA 13 that
# torch brings may do.
if [ "$device" = cuda ] && [ -z "${CUDA_PATH:-}" ]; then
    CUDA_PATH=/usr/local/cuda
    if [ ! -d "$CUDA_PATH/include" ]; then
        find_wheels='import glob, importlib.util as u
spec = u.find_spec("nvidia")
roots = spec.submodule_search_locations if spec else []
print(next((f for root in roots for f in glob.glob(root + "/cu1*")), ""))'
        CUDA_PATH=$("$python" -c "$find_wheels" 2>/dev/null || true)
    fi
fi
if [ "$device" = cuda ]; then
    # After what is there already, so that another NVRTC can be put before the toolkit's.
    export CUDA_PATH PATH=$PATH:$CUDA_PATH/bin
    export LD_LIBRARY_PATH=${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}$CUDA_PATH/lib:$CUDA_PATH/lib64
fi
# The same headers without three that CubeCL includes in every kernel with tensor maps, which takes NVRTC four seconds to read each
# time. Our kernels use nothing of theirs; Burn's may, so measurements take the real ones.
fast=$work/cuda
mkdir -p "$fast"/include/{cuda,cccl/cuda,cooperative_groups}
if [ -d "${CUDA_PATH:-}/include" ]; then
    # libcu++ lies in `cuda` in CUDA 12, in `cccl/cuda` in 13.
    for folder in . cuda cccl cccl/cuda cooperative_groups; do
        [ ! -d "$CUDA_PATH/include/$folder" ] || ln -s "$CUDA_PATH/include/$folder"/* "$fast/include/$folder/" 2>/dev/null
    done
    for header in cooperative_groups.h cooperative_groups/memcpy_async.h cuda/barrier cccl/cuda/barrier; do
        rm -f "$fast/include/$header"
        : >"$fast/include/$header"
    done
fi
# skip NAME WHY
skip() {
    printf '%-12s not run: %s\n' "$1" "$2" | tee -a "$out/summary.txt"
}
torch=()
if "$python" -c 'import torch; assert torch.cuda.is_available()' 2>/dev/null; then
    torch=(--torch "$python")
else
    skip torch "$python has none that sees a CUDA device"
fi

status=0
# step NAME SECONDS COMMAND...: `LEFT` in the command stands for the seconds that it has.
step() {
    local name=$1 limit=$2 left=$((end - SECONDS)) begin=$SECONDS code
    shift 2
    if [ "$left" -lt 15 ]; then
        skip "$name" "no time left"
        return
    fi
    [ "$limit" -le "$left" ] || limit=$left
    set -- "${@//LEFT/$((limit - 5))}"
    printf '\n== %s: %s\n' "$name" "${*@Q}" | tee -a "$out/log.txt"
    # Killed only if it does not end by itself.
    timeout -k 5 "$limit" "$@" 2>&1 | tee -a "$out/log.txt"
    code=${PIPESTATUS[0]}
    case $code in
        0) outcome=passed ;;
        3) outcome="right, but INCOMPLETE" ;;
        124 | 137) outcome="KILLED at its limit" ;;
        *) outcome="FAILED ($code)" ;;
    esac
    [ "$code" = 0 ] || [ "$code" = 3 ] || status=1
    printf '%-12s %s after %d s\n' "$name" "$outcome" $((SECONDS - begin)) | tee -a "$out/summary.txt"
    return "$code"
}
# check NAME SECONDS OPTIONS...
check() {
    local name=$1 limit=$2
    shift 2
    step "$name" "$limit" env CUDA_PATH="$fast" "$gpu" --device "$device" check --limit-seconds LEFT --json "$out/check.jsonl" "$@"
}
# bench NAME SECONDS OPTIONS...
bench() {
    local name=$1 limit=$2
    shift 2
    step "$name" "$limit" "$gpu" --device "$device" bench --limit-seconds LEFT --json "$out/$name.json" "$@"
}
# sanitize TOOL: one small GEMM, by each kernel that the device has for it, in one worker.
sanitize() {
    step "$1" 60 env CUDA_PATH="$fast" compute-sanitizer --tool "$1" --target-processes all --error-exitcode 7 \
        "$gpu" check --jobs 1 --case-seconds 50 --limit-seconds LEFT --only "scaled_gemm 257x130x32 e4m3,e4m3 tensorwise,tensorwise"
}

step versions 30 sh -c "nvidia-smi 2>/dev/null; nvcc --version 2>/dev/null | tail -n 2; '$python' -c 'import torch; print(\"torch\", torch.__version__)' 2>/dev/null; '$gpu' --device '$device' versions" || exit 2
check casts 90 --only golden_cast --only golden_scale --only golden_codes --only golden_mx --only "quantize 37x140 "
check smallest 60 --trap --only "scaled_gemm 64x64x64 e4m3,e4m3"
check clusters 90 --trap --only "scaled_gemm 1024x1024x1024 e4m3,e4m3" --only "scaled_gemm 4096x4096x4096 e4m3,e4m3" \
    --only "grouped_gemm rows 3001+499+0+17+300+129+100+50:137 4233x1032x1040 e4m3,e4m3 tensorwise,tensorwise"
check repeated 60 --only repeated_gemm
if [ "$device" = cuda ] && command -v compute-sanitizer >/dev/null; then
    sanitize memcheck
    sanitize synccheck
else
    skip sanitizer "no compute-sanitizer for $device"
fi
bench gemm 240 --only gemm --size headline "${torch[@]}"
bench host 60 --only host --size headline
check linears 60 --only "linear tensorwise 256x512x384" --only "256x512x384 BF16 exact"
bench linear 180 --only linear,quantize --size headline "${torch[@]}"
bench step 180 --only step --size headline
if [ "$device" = cuda ] && command -v ncu >/dev/null; then
    step ncu 120 ncu --target-processes all --kernel-name 'regex:gemm_(hopper|blackwell)' --launch-skip 20 --launch-count 3 \
        --section SpeedOfLight --section WarpStateStats --section LaunchStats --section ComputeWorkloadAnalysis \
        "$gpu" bench --only gemm --size headline --limit-seconds 60
else
    skip ncu "no ncu for $device"
fi
# All the rest, for as long as there is time.
check rest $((end / 3))
bench full "$end" --size full "${torch[@]}"
printf '\n'
cat "$out/summary.txt"
exit "$status"

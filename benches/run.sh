#!/usr/bin/env bash
# The first run on a GPU, in the order of FIRST_RUN.md: the most valuable things first, each with a limit, what is known written as
# it comes. In a folder that bundle.sh made.
#
#   ./run.sh [--minutes 10] [--device cuda|wgpu]
#
# CUDA_PATH: the toolkit to take, before all that are found. PYTHON: the Python with torch (python3). OUT: the folder for the results
# (this one): summary.txt, log.txt, check.jsonl, clocks.csv, and a JSON file for each measurement. Exit code 0 if nothing that ran was
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
clocks=
finish() {
    [ -z "$clocks" ] || kill "$clocks" 2>/dev/null
    rm -rf "$work"
}
trap finish EXIT

# The binary travels compressed.
gpu=$work/float8-gpu
"$python" -c 'import lzma, shutil, sys; shutil.copyfileobj(lzma.open(sys.argv[1]), open(sys.argv[2], "wb"))' \
    "$here/float8-gpu.xz" "$gpu" || exit 1
chmod +x "$gpu"

say() {
    printf '%s\n' "$*" | tee -a "$out/log.txt"
}

# Kernels are compiled on the machine: the newest NVRTC that the driver reads, and headers. Toolkits, then the wheels beside torch,
# whose folders are of CUDA 13 one (nvidia/cu13), of CUDA 12 one for each package. What is chosen is put together in a folder of its own.
if [ "$device" = cuda ]; then
    [ -z "${CUDA_PATH:-}" ] || CUDA_PATH=$(realpath -m "$CUDA_PATH")
    driver=$(nvidia-smi 2>/dev/null | sed -n 's/.*CUDA Version: *\([0-9][0-9]*\.[0-9][0-9]*\).*/\1/p' | head -n 1)
    wheels=$("$python" -c 'import importlib.util as u
spec = u.find_spec("nvidia")
print("\n".join(spec.submodule_search_locations if spec else []))' 2>/dev/null || true)
    # Lines "version|folder with libnvrtc|folders whose include is taken".
    candidates=$(
        # candidate FOLDER HEADERS: a line if there is an NVRTC in the folder, whose version is in the names of files.
        candidate() {
            local file
            for file in "$1"/libnvrtc.so.*.*.* "$1"/libnvrtc-builtins.so.*.*; do
                if [ -e "$file" ]; then
                    basename "$file" | sed -n "s#.*\.so\.\([0-9]*\.[0-9]*\).*#\1|$1|$2#p"
                    return
                fi
            done
        }
        for root in ${CUDA_PATH:+"$CUDA_PATH"} /usr/local/cuda /usr/local/cuda-* /opt/cuda; do
            [ ! -d "$root/include" ] || for lib in lib64 lib; do candidate "$root/$lib" "$root"; done
        done
        for nvidia in $wheels; do
            for root in "$nvidia"/cu1*; do candidate "$root/lib" "$root"; done
            candidate "$nvidia/cuda_nvrtc/lib" \
                "$nvidia/cuda_runtime:$nvidia/cuda_cccl:$nvidia/cuda_nvcc:$nvidia/cuda_nvrtc"
        done
    )
    say "driver of CUDA ${driver:-unknown}; toolkits found:"
    say "${candidates:-none}"
    best=$(printf '%s\n' "$candidates" | awk -F'|' -v driver="${driver:-99.9}" -v asked="${CUDA_PATH:-}" '
        function number(v, p) { split(v, p, "."); return p[1] * 100 + p[2] }
        NF == 3 && number($1) <= number(driver) {
            rank = number($1) + ($3 == asked ? 1000000 : 0)
            if (rank > most) { most = rank; line = $0 }
        }
        END { print line }')
    if [ -n "$best" ]; then
        IFS='|' read -r chosen lib roots <<<"$best"
        toolkit=$work/toolkit
        mkdir -p "$toolkit/include"
        IFS=: read -ra roots <<<"$roots"
        for root in "${roots[@]}"; do
            [ ! -d "$root/include" ] || cp -rsn "$root/include/." "$toolkit/include/" 2>/dev/null
        done
        say "taken: CUDA $chosen of $lib, headers of ${roots[*]}"
        export CUDA_PATH=$toolkit LD_LIBRARY_PATH=$lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
    else
        # NVRTC may be where the loader finds it.
        [ -n "${CUDA_PATH:-}" ] || CUDA_PATH=/usr/local/cuda
        export CUDA_PATH
        say "no toolkit with an NVRTC that the driver reads: headers of $CUDA_PATH, and the loader's NVRTC"
    fi
fi
# The same headers without three that CubeCL includes in every kernel with tensor maps, which takes NVRTC four seconds to read each
# time. Our kernels use nothing of theirs; Burn's may, so measurements take the real ones where there are all of them.
fast=$work/cuda full=$work/cuda
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
    for nv in include/nv/target include/cccl/nv/target; do
        [ ! -e "$CUDA_PATH/$nv" ] || full=$CUDA_PATH
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
# What the clocks were while something was timed.
if [ "$device" = cuda ] && command -v nvidia-smi >/dev/null; then
    nvidia-smi --query-gpu=timestamp,clocks.sm,power.draw,clocks_event_reasons.active --format=csv -lms 200 \
        >"$out/clocks.csv" 2>/dev/null &
    clocks=$!
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
# optional NAME SECONDS COMMAND...: of a tool that containers often forbid, so that its failure is none, but for an error that it finds.
optional() {
    local before=$status
    step "$@"
    [ $? = 7 ] || status=$before
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
    step "$name" "$limit" env CUDA_PATH="$full" "$gpu" --device "$device" bench --limit-seconds LEFT --json "$out/$name.json" "$@"
}
# sanitize TOOL: one small GEMM, by each kernel that the device has for it, in one worker.
sanitize() {
    optional "$1" 60 env CUDA_PATH="$fast" compute-sanitizer --tool "$1" --target-processes all --error-exitcode 7 \
        "$gpu" check --jobs 1 --case-seconds 50 --limit-seconds LEFT --only "scaled_gemm 257x130x32 e4m3,e4m3 tensorwise,tensorwise"
}

step versions 30 sh -c "nvidia-smi 2>/dev/null; nvcc --version 2>/dev/null | tail -n 2; '$python' -c 'import torch; print(\"torch\", torch.__version__)' 2>/dev/null; CUDA_PATH='$full' '$gpu' --device '$device' versions" || exit 2
# The kernels as they ship. With traps they are others: serialized products, spills.
check smallest 45 --only "scaled_gemm 64x64x64 e4m3,e4m3" ||
    check trapped 60 --trap --only "scaled_gemm 64x64x64 e4m3,e4m3"
# A number by minute two.
bench first 40 --only gemm --size first --case-seconds 30
check casts 60 --only golden_cast --only golden_scale --only golden_codes --only golden_mx --only "quantize 37x140 "
check exact 90 --only "1024x1024x1024 e4m3,e4m3 tensorwise,tensorwise exact" --only "300x260x128 e4m3,e4m3 rowwise,rowwise exact" \
    --only "300x260x128 e4m3,e4m3 1x128,128x128 exact" --only "66x70x48 e4m3,e4m3 tensorwise,tensorwise exact" \
    --only "grouped_gemm rows 3001+499+0+17+300+129+100+50:137 4233x1032x1040 e4m3,e4m3 tensorwise,tensorwise"
check clusters 60 --only "scaled_gemm 4096x4096x4096 e4m3,e4m3"
check repeated 60 --only repeated_gemm
bench gemm 240 --only gemm,grouped --size headline "${torch[@]}"
bench host 60 --only host --size headline
check few 60 --only "scaled_gemm 1x131x300" --only "scaled_gemm 4x9x513" --only "scaled_gemm rows alone" --only "transpose "
bench gemv 90 --only gemv --size headline
bench sweep 120 --only sweep --size headline
check linears 60 --only "linear tensorwise 256x512x384" --only "256x512x384 BF16 exact"
check beside 30 --only "swiglu " --only "rms_norm " --only "rotary "
bench linear 200 --only linear,quantize,beside --size headline "${torch[@]}"
bench step 180 --only step --size headline
# Torch once more: the clocks of a warm device.
[ "${#torch[@]}" = 0 ] || bench after 90 --only gemm --size headline "${torch[@]}"
# All the rest, but for what the tools need.
check rest $((end / 3))
if [ "$device" = cuda ] && command -v compute-sanitizer >/dev/null; then
    sanitize memcheck
    sanitize synccheck
else
    skip sanitizer "no compute-sanitizer for $device"
fi
if [ "$device" = cuda ] && command -v ncu >/dev/null; then
    optional ncu 120 env CUDA_PATH="$full" ncu --target-processes all --kernel-name 'regex:gemm_(hopper|blackwell)' \
        --launch-skip 20 --launch-count 3 \
        --section SpeedOfLight --section WarpStateStats --section LaunchStats --section ComputeWorkloadAnalysis \
        "$gpu" bench --only gemm --size headline --limit-seconds 60
else
    skip ncu "no ncu for $device"
fi
bench full "$end" --size full "${torch[@]}"
printf '\n'
cat "$out/summary.txt"
exit "$status"

#!/usr/bin/env bash
# The runs on a GPU, in the order of FIRST_RUN.md: the most valuable things first, each with a limit. In a folder that bundle.sh made.
#
#   ./run.sh [first|second] [--seconds N] [--device cuda|wgpu] [--tiny] [--plan]
#
# `first` has 540 seconds, `second` 200. --plan prints the steps and their seconds, and ends. --tiny, to try the script, takes small shapes
# and leaves out the checks without seconds of their own, and the measurements that `full` repeats.
# CUDA_PATH: the toolkit to take, before all that are found. PYTHON: the Python with torch (python3). OUT: the folder for the results
# (this one): one file, results-first.tar or results-second.tar, of at most 16 MiB, renewed every five seconds and after every step.
# FLOAT8_PTX_CACHE: the folder for compiled kernels. Exit code 0 if nothing that ran was wrong, whether or not all ran; 2 without a
# device; 64 for arguments that it does not take.
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-python3}
part=first seconds='' device=cuda plan=no tiny=no
usage() {
    echo "usage: $0 [first|second] [--seconds N] [--device cuda|wgpu] [--tiny] [--plan]" >&2
    exit 64
}
while [ $# -gt 0 ]; do
    case "$1" in
        first | second) part=$1 ;;
        --seconds) seconds=${2:-} && shift ;;
        --device) device=${2:-} && shift ;;
        --tiny) tiny=yes ;;
        --plan) plan=yes ;;
        *) usage ;;
    esac
    shift || usage
done
# Seconds of the part, those of them that steps may take beyond their own, and those that the end takes.
if [ "$part" = first ]; then usual=540 spare=30; else usual=200 spare=15; fi
ending=10
seconds=${seconds:-$usual}
[[ $seconds =~ ^[1-9][0-9]*$ && $device =~ ^(cuda|wgpu)$ ]] || usage
SECONDS=0
end=$((seconds - ending))
planned=0 startup=0 status=0

# skip NAME WHY
skip() {
    printf '%-12s not run: %s\n' "$1" "$2" | tee -a "$results/summary.txt"
}
# pack: the results as one file, which is always whole. Of a file that is too long its beginning and its end are kept.
pack() (
    flock 9
    most=$((768 * 1024))
    rm -rf "$work/tar"
    mkdir "$work/tar"
    for file in "$results"/*; do
        if [ "$(stat -c %s "$file")" -le $most ]; then
            cp "$file" "$work/tar/"
        else
            { head -c $((most / 2)) "$file"; printf '\n[cut]\n'; tail -c $((most / 2)) "$file"; } >"$work/tar/${file##*/}"
        fi
    done
    tar -C "$work/tar" -cf "$out/.results-$part.tar" . && mv "$out/.results-$part.tar" "$out/results-$part.tar"
) 9>"$work/lock"
# step NAME SECONDS COMMAND...: `LEFT` in the command stands for the seconds that it has. What earlier steps have left over is this one's
# too. Of 0 seconds: what is left in the end.
step() {
    local name=$1 own=$2 limit by_plan begin=$SECONDS code outcome
    shift 2
    planned=$((planned + own))
    if [ "$plan" = yes ]; then
        [ "$own" = 0 ] || printf '%-12s %4d\n' "$name" "$own"
        return
    fi
    if [ "$own" = 0 ] && [ "$tiny" = yes ] && [ "$name" != full ]; then return; fi
    limit=$((end - SECONDS))
    by_plan=$(((planned + spare) * seconds / usual + startup - SECONDS))
    if [ "$own" -gt 0 ] && [ "$by_plan" -lt "$limit" ]; then limit=$by_plan; fi
    if [ "$limit" -lt 10 ]; then
        skip "$name" "no time left"
        return
    fi
    set -- "${@//LEFT/$((limit - 5))}"
    printf '\n== %s: %s\n' "$name" "${*@Q}" | tee -a "$results/log.txt"
    # Killed only if it does not end by itself.
    timeout -k 5 "$limit" "$@" 2>&1 | tee -a "$results/log.txt"
    code=${PIPESTATUS[0]}
    case $code in
        0) outcome=passed ;;
        3) outcome="right, but INCOMPLETE" ;;
        124 | 137) outcome="KILLED at its limit" ;;
        *) outcome="FAILED ($code)" ;;
    esac
    [ "$code" = 0 ] || [ "$code" = 3 ] || status=1
    printf '%-12s %s after %d s\n' "$name" "$outcome" $((SECONDS - begin)) | tee -a "$results/summary.txt"
    pack
    return "$code"
}
# optional NAME SECONDS COMMAND...: of a tool that containers often forbid, so that its failure is none, but for an error that it finds.
optional() {
    local before=$status
    step "$@"
    [ $? = 7 ] || status=$before
}
# on HEADERS COMMAND...: with CUDA's `fast` or `full` headers, and its NVRTC, in a folder that turns CubeCL's cache of compiled kernels on.
on() {
    local headers=$1
    shift
    command=(env -C "$work/cached" "CUDA_PATH=${!headers}" ${library:+"LD_LIBRARY_PATH=$library"} "$@")
}
# check NAME SECONDS OPTIONS...: without the cache, which several workers would write at once.
check() {
    local name=$1 own=$2
    shift 2
    # Checks run without the cache.
    if [ "$compiles" = no ]; then
        skip "$name" "no NVRTC"
        return
    fi
    on fast "$gpu" --device "$device" check --limit-seconds LEFT --json "$results/check.jsonl" "${small_checks[@]}" "$@"
    command[2]=$work
    step "$name" "$own" "${command[@]}"
}
# bench NAME SECONDS HEADERS SIZE OPTIONS...
bench() {
    local name=$1 own=$2 headers=$3 size=${small:-$4}
    shift 4
    if [ "$tiny" = yes ] && [ "$part" = first ] && [ "$name" != full ]; then return; fi
    # Of a worker that was killed.
    [ "$plan" = yes ] || find "$cache" -name '*.lock' -delete
    on "$headers" "$gpu" --device "$device" bench --limit-seconds LEFT --json "$results/$name.json" --size "$size" \
        "$@" "${small_benches[@]}"
    step "$name" "$own" "${command[@]}"
}
# has_torch NAME: waits for the answer, which may take a slow disk a minute. Puts what `bench` is told of it into `torch`.
has_torch() {
    [ "$plan" = no ] || return 0
    wait "$probe"
    if [ -s "$work/torch.version" ]; then
        torch=(--torch "$work/torch")
    else
        skip torch "$python has none that sees a CUDA device"
    fi
}
# tool NAME: whether NVIDIA's tool is there.
tool() {
    [ "$plan" = no ] || return 0
    [ "$device" = cuda ] && command -v "$1" >/dev/null || { skip "$1" "no $1 for $device"; return 1; }
}

# By value: if the time ends early, what is lost is worth least.
first() {
    check smallest 15 --only "scaled_gemm 64x64x64 e4m3,e4m3"
    bench first 25 fast first --only gemm --without-burn
    has_torch
    bench pair 60 full first --only gemm,linear --without-burn "${torch[@]}"
    bench casts 30 fast first --only quantize
    bench cubes 60 fast headline --only gemm --without-burn "${torch[@]}"
    check exact 60 --only "1024x1024x1024 e4m3,e4m3 tensorwise,tensorwise exact" --only "300x260x128 e4m3,e4m3 rowwise,rowwise exact" \
        --only "300x260x128 e4m3,e4m3 1x128,128x128 exact" --only "66x70x48 e4m3,e4m3 tensorwise,tensorwise exact" \
        --only "grouped_gemm rows 3001+499+0+17+300+129+100+50:137 4233x1032x1040 e4m3,e4m3 tensorwise,tensorwise"
    check attention 14 --only "attention grouped bf16" --only "attention wide f16" --only "attention documents bf16" \
        --only "attention rounds bf16 wgmma"
    bench attention 25 full first --only beside "${torch[@]}"
    bench step 140 full first --only step --case-seconds 160
    bench host 20 full first --only host
    check repeated 40 --only repeated_gemm
    # What is left.
    check golden 0 --only golden_ --only "quantize 37x140 "
    check clusters 0 --only "scaled_gemm 4096x4096x4096 e4m3,e4m3"
    check linears 0 --only "linear tensorwise 256x512x384" --only "256x512x384 BF16 exact"
    check few 0 --only "scaled_gemm 1x131x300" --only "scaled_gemm 4x9x513" --only "scaled_gemm rows alone" --only "transpose "
    check beside 0 --only "swiglu " --only "rms_norm " --only "rotary " --only "attention "
    bench gemv 0 fast headline --only gemv
    bench linear 0 full headline --only linear,quantize,beside,host "${torch[@]}"
    bench sweep 0 fast headline --only sweep
    check rest 0
    bench full 0 full full "${torch[@]}"
}
second() {
    bench scaled 55 fast headline --only scaled
    has_torch
    bench grouped 50 full headline --only grouped "${torch[@]}"
    if tool compute-sanitizer; then
        # One small GEMM, by each kernel that the device has for it, in one worker.
        on fast compute-sanitizer --tool synccheck --target-processes all --error-exitcode 7 "$gpu" check --jobs 1 --case-seconds 30 \
            --limit-seconds LEFT --only "scaled_gemm 257x130x32 e4m3,e4m3 tensorwise,tensorwise"
        optional synccheck 20 "${command[@]}"
    fi
    if tool ncu; then
        # ncu would lock the clocks.
        on fast ncu --clock-control none --target-processes all --kernel-name 'regex:gemm_(hopper|blackwell)' \
            --launch-skip 20 --launch-count 1 \
            --section SpeedOfLight --section WarpStateStats --section LaunchStats --section ComputeWorkloadAnalysis \
            "$gpu" bench --only gemm --size first --without-burn --limit-seconds LEFT
        optional ncu 20 "${command[@]}"
    fi
}

compiles=yes torch=() small='' small_checks=() small_benches=() library='' gpu=float8-gpu work='' results='' fast='' full=''
versions() {
    on fast "$gpu" --device "$device" versions
    step versions 10 "${command[@]}"
}
if [ "$plan" = yes ]; then
    versions
    $part
    printf '%-12s %4d\n%-12s %4d\n%-12s %4d\n' sum "$planned" spare "$spare" ending "$ending"
    exit
fi

out=${OUT:-$here}
mkdir -p "$out" && out=$(cd "$out" && pwd) || exit 1
work=$(mktemp -d)
results=$work/results clocks='' probe='' packer=''
mkdir "$results" "$work/cached"
: >"$results/summary.txt" >"$results/log.txt"
finish() {
    kill $clocks $probe $packer 2>/dev/null
    pack
    rm -rf "$work"
}
trap finish EXIT
trap 'exit 130' INT TERM HUP
# A killed run keeps what its last step has written.
while kill -0 $$; do
    pack
    sleep 5
done >/dev/null 2>&1 &
packer=$!
if [ "$tiny" = yes ]; then
    small_checks=(--quick --case-seconds 1000)
    small_benches=(--repeat 1 --case-seconds 1000) small=tiny
fi
say() {
    printf '%s\n' "$*" | tee -a "$results/log.txt"
}

# Torch is a process of its own, with the environment of this script and not that of our programs. To import it may take a minute.
[[ $python != */* ]] || python=$(realpath -s "$python")
{
    echo '#!/bin/bash'
    for name in CUDA_PATH LD_LIBRARY_PATH; do
        if [ -n "${!name+set}" ]; then printf 'export %s=%q\n' "$name" "${!name}"; else echo "unset $name"; fi
    done
    printf 'exec %q "$@"\n' "$python"
} >"$work/torch"
chmod +x "$work/torch"
timeout -k 5 60 "$python" -c 'import torch; assert torch.cuda.is_available(); print(torch.__version__)' \
    >"$work/torch.version" 2>/dev/null &
probe=$!

# The binary travels compressed.
gpu=$work/float8-gpu
unlzma='import lzma, shutil, sys; shutil.copyfileobj(lzma.open(sys.argv[1]), sys.stdout.buffer)'
for unpack in "xz -dc" "busybox xz -dc" "7z e -so" "python"; do
    if [ "$unpack" = python ]; then set -- "$python" -c "$unlzma"; else read -ra words <<<"$unpack" && set -- "${words[@]}"; fi
    ! "$@" "$here/float8-gpu.xz" >"$gpu" 2>/dev/null || break
    unpack=
done
if [ -z "$unpack" ]; then
    say "nothing unpacks float8-gpu.xz: xz, busybox, 7z and $python with lzma were tried"
    exit 1
fi
chmod +x "$gpu"

# Kernels are compiled on the machine: the newest NVRTC that the driver reads, and headers. Toolkits, then the wheels beside torch,
# whose folders are of CUDA 13 one (nvidia/cu13), of CUDA 12 one for each package. NVRTC and headers may be in different ones, so the
# headers of all roots of its version are put together in a folder of their own: of two the first.
arch=''
if [ "$device" = cuda ]; then
    asked=
    [ -z "${CUDA_PATH:-}" ] || asked=$(realpath -m "$CUDA_PATH")
    smi=$(nvidia-smi 2>/dev/null)
    say "$smi"
    say "$(nvcc --version 2>/dev/null | tail -n 2)"
    arch=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | sort -u | tr '\n' _)
    driver=$(sed -n 's/.*CUDA Version: *\([0-9][0-9]*\.[0-9][0-9]*\).*/\1/p' <<<"$smi" | head -n 1)
    wheels=$("$python" -c 'import importlib.util as u
spec = u.find_spec("nvidia")
print("\n".join(spec.submodule_search_locations if spec else []))' 2>/dev/null)
    # Lines "version|folder with libnvrtc, or nothing|folders whose include is taken".
    candidates=$(
        # candidate LIB HEADERS: the version is in NVRTC's name, or else in the headers.
        candidate() {
            local file header
            for file in "$1"/libnvrtc.so.*.*.* "$1"/libnvrtc-builtins.so.*.*; do
                if [ -e "$file" ]; then
                    basename "$file" | sed -n "s#.*\.so\.\([0-9]*\.[0-9]*\).*#\1|$1|$2#p"
                    return
                fi
            done
            header=${2%%:*}/include/cuda_runtime_api.h
            [ ! -e "$header" ] || awk -v roots="$2" '$2 == "CUDART_VERSION" {
                printf "%d.%d||%s\n", $3 / 1000, $3 % 1000 / 10, roots; exit }' "$header"
        }
        for root in ${asked:+"$asked"} /usr/local/cuda /usr/local/cuda-* /opt/cuda; do
            lib=$root/lib64
            [ -e "$lib" ] || lib=$root/lib
            [ ! -d "$root/include" ] || candidate "$lib" "$root"
        done
        for nvidia in $wheels; do
            for root in "$nvidia"/cu1*; do candidate "$root/lib" "$root"; done
            candidate "$nvidia/cuda_nvrtc/lib" \
                "$nvidia/cuda_runtime:$nvidia/cuda_cccl:$nvidia/cuda_nvcc:$nvidia/cuda_nvrtc"
        done
    )
    say "driver of CUDA ${driver:-unknown}; toolkits found:"
    say "${candidates:-none}"
    best=$(awk -F'|' -v driver="${driver:-99.9}" -v asked="$asked" '
        function number(v, p) { split(v, p, "."); return p[1] * 100 + p[2] }
        NF == 3 && $2 != "" && number($1) <= number(driver) {
            rank = number($1) + ($3 == asked ? 1000000 : 0)
            if (rank > most) { most = rank; line = $0 }
        }
        END { print line }' <<<"$candidates")
    full=${asked:-/usr/local/cuda}
    if [ -n "$best" ]; then
        IFS='|' read -r version lib _ <<<"$best"
        full=$work/toolkit
        mkdir -p "$full/include"
        roots=$(awk -F'|' -v version="$version" '$1 == version { print $3 }' <<<"$candidates" | tr : '\n')
        while read -r root; do
            [ ! -d "$root/include" ] || cp -rsn "$root/include/." "$full/include/" 2>/dev/null
        done <<<"$roots"
        say "taken: CUDA $version of $lib, headers of ${roots//$'\n'/ }"
        library=$lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
        arch+=$version
    else
        say "no toolkit with an NVRTC that the driver reads: headers of $full, and the loader's NVRTC"
        # What the bundle has compiled needs none.
        for packed in "$here/ptx-$arch"*.tar.xz; do
            [ ! -e "$packed" ] || { arch=${packed##*/ptx-} && arch=${arch%.tar.xz} && compiles=no && say "kernels of ${packed##*/}"; }
        done
    fi
    # What the clocks were while something was timed.
    nvidia-smi --query-gpu=timestamp,clocks.sm,power.draw,clocks_event_reasons.active --format=csv -lms 200 \
        >"$results/clocks.csv" 2>/dev/null &
    clocks=$!
fi
# The same headers without three that CubeCL includes in every kernel with tensor maps, which takes NVRTC four seconds to read each
# time. Our kernels use nothing of theirs; Burn's may, so what measures these takes the real ones where there are all of them.
fast=$work/cuda
mkdir -p "$fast"/include/{cuda,cccl/cuda,cooperative_groups}
if [ -d "$full/include" ]; then
    # libcu++ lies in `cuda` in CUDA 12, in `cccl/cuda` in 13.
    for folder in . cuda cccl cccl/cuda cooperative_groups; do
        [ ! -d "$full/include/$folder" ] || ln -s "$full/include/$folder"/* "$fast/include/$folder/" 2>/dev/null
    done
    for header in cooperative_groups.h cooperative_groups/memcpy_async.h cuda/barrier cccl/cuda/barrier; do
        rm -f "$fast/include/$header"
        : >"$fast/include/$header"
    done
fi
[ -e "$full/include/nv/target" ] || [ -e "$full/include/cccl/nv/target" ] || full=$fast

# CubeCL's cache of compiled kernels, which each process would compile anew. It keys Burn's kernels by neither architecture, compiler nor
# version of Burn, so each of these has a cache of its own.
cache=${FLOAT8_PTX_CACHE:-${XDG_CACHE_HOME:-${HOME:-$work}/.cache}/float8-gpu}/${arch:-any}-$(cksum <"$here/float8-gpu.xz" | tr ' ' -)
mkdir -p "$cache" 2>/dev/null && [ -w "$cache" ] || { cache=$work/cache && mkdir -p "$cache"; }
# What bundle.sh has compiled for this architecture with this NVRTC.
if [ -e "$here/ptx-$arch.tar.xz" ] && [ ! -e "$cache/cuda" ]; then
    "$python" -c 'import sys, tarfile; tarfile.open(sys.argv[1]).extractall(sys.argv[2])' "$here/ptx-$arch.tar.xz" "$cache" 2>/dev/null ||
        say "ptx-$arch.tar.xz cannot be unpacked"
fi
printf '[compilation]\ncache = { file = "%s" }\n' "$cache" >"$work/cached/cubecl.toml"

startup=$SECONDS
versions
[ $? != 2 ] || exit 2
$part
printf '\n'
cat "$results/summary.txt"
exit "$status"

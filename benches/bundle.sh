#!/usr/bin/env bash
# Builds the GPU program for a machine without Rust: the binary, compressed, and run.sh in one folder to copy there.
#
#   benches/bundle.sh [FOLDER]      default: target/float8-gpu
#
# CUDARC_CUDA_VERSION: the version of the driver's bindings, 13000 for 13.0 (default). They load each symbol when it is first used, so
# that an older driver should do; FIRST_RUN.md says what does not.
# FLOAT8_CUDA_TOOLS: a toolkit or its wheels, of CUDA 13.0. Kernels that run.sh times are then compiled for sm_90a and sm_100a, on a driver
# that launches nothing (tests/cuda/fake-driver), and their PTX travels along.
# AUTOTUNE=1: Burn tunes its high-precision kernels for each shape.
# VULKAN=1: on Vulkan, wgpu kernels are compiled to SPIR-V instead of WGSL: GEMMs use cooperative matrices if the adapter has them.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=${1:-target/float8-gpu}
limit_mib=20

# A build machine has no driver to take the version from. A target folder of its own: another version rebuilds everything above the
# bindings.
export CUDARC_CUDA_VERSION=${CUDARC_CUDA_VERSION:-13000}
export CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-$PWD/target}/cuda-$CUDARC_CUDA_VERSION
features=()
[ "${AUTOTUNE:-0}" = 0 ] || features+=(--features benches/autotune)
[ "${VULKAN:-0}" = 0 ] || features+=(--features benches/vulkan)
# Nothing of the line tables is left after stripping.
export CARGO_PROFILE_RELEASE_DEBUG=false
cargo build --release --bin float8-gpu "${features[@]}"

mkdir -p "$folder"
work=$(mktemp -d)
binary=$work/float8-gpu
trap 'rm -rf "$work"' EXIT
strip --strip-all -o "$binary" "$CARGO_TARGET_DIR/release/float8-gpu"
python3 -c 'import lzma, shutil, sys; shutil.copyfileobj(open(sys.argv[1], "rb"), lzma.open(sys.argv[2], "wb", preset=6))' \
    "$binary" "$folder/float8-gpu.xz"
if [ -n "${FLOAT8_CUDA_TOOLS:-}" ]; then
    cargo build --release -p fake-driver
    for arch in 9.0 10.0; do
        mkdir "$work/$arch"
        printf '[compilation]\ncache = { file = "%s" }\n' "$work/$arch" >"$work/cubecl.toml"
        # Parts whose inputs are small: a whole model would need its size in memory here.
        env -C "$work" FAKE_CUDA="${arch/./}" FAKE_CUDA_CHECK_ONLY=1 LD_PRELOAD="$CARGO_TARGET_DIR/release/libfake_cuda.so" \
            CUDA_PATH="$FLOAT8_CUDA_TOOLS" LD_LIBRARY_PATH="$FLOAT8_CUDA_TOOLS/lib" \
            "$binary" bench --only gemm,scaled,gemv,linear,quantize,grouped,beside,host,sweep --size headline --repeat 1 --limit-seconds 1200 >"$work/log" ||
            { tail "$work/log" >&2; exit 1; }
        # Named as run.sh names its caches: by architecture and by NVRTC.
        tar -C "$work/$arch" -cJf "$folder/ptx-${arch}_13.0.tar.xz" .
    done
fi
cp benches/run.sh benches/FIRST_RUN.md "$folder/"
chmod +x "$folder/run.sh"
size=$(stat -c %s "$folder/float8-gpu.xz")
echo "$folder: float8-gpu.xz has $((size / 1048576)) MiB, $(($(stat -c %s "$binary") / 1048576)) MiB unpacked"
ls -l "$folder"
[ "$size" -lt $((limit_mib * 1048576)) ] || { echo "more than $limit_mib MiB" >&2; exit 1; }

#!/usr/bin/env bash
# Makes the data of the picture on the first page anew, and the picture: nine runs on a CPU, one or two minutes each.
set -euo pipefail
cd "$(dirname "$0")/../.."
cargo build --release --bin float8
float8=$PWD/target/release/float8
text=$(mktemp -d)
trap 'rm -rf "$text"' EXIT
git ls-files crates kernels models | grep '\.rs$' | xargs cp --parents -t "$text"

run() { # FILE, then flags
    local file=$PWD/docs/curves/$1
    shift
    (cd "$text" && "$float8" train --device cpu --data crates --data kernels --data models --steps 300 "$@" \
        --set training.log_every=5 --set training.eval_every=50 --output-dir run)
    mv "$text/run/metrics.jsonl" "$file"
    rm -r "$text/run"
    # Timings of one machine at one time say nothing here.
    sed -E -i 's/,"(tokens_per_second|tflops|memory_bytes)":[^,}]*//g' "$file"
}

run f32.jsonl --precision f32
run bf16.jsonl --precision bf16
for recipe in tensorwise rowwise rowwise_with_gw_hp delayed blockwise mxfp8 mxfp8_wgrad_with_hp; do
    run fp8/$recipe.jsonl --recipe $recipe
done
# The command of docs/watch.md.
$(grep -o 'float8 plot docs/curves.*' docs/watch.md | sed "s#^float8#$float8#")

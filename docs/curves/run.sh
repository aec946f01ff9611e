#!/usr/bin/env bash
# Makes the data of the README's picture again, and the picture: the program and the text of one commit, nine runs on a CPU of about a minute
# each on two cores, after a build.
set -euo pipefail
cd "$(dirname "$0")/../.."
commit=0a44c492c7a0
root=$PWD
source=$(mktemp -d)
trap 'git worktree remove --force "$source/tree"; rm -rf "$source"' EXIT
git worktree add --quiet --detach "$source/tree" $commit
(cd "$source/tree" && cargo build --release --bin float8)
float8=$source/tree/target/release/float8
mkdir "$source/text"
(cd "$source/tree" && git ls-files crates kernels models | grep '\.rs$' | xargs cp --parents -t "$source/text")

run() { # FILE, then flags
    local file=$root/docs/curves/$1
    shift
    (cd "$source/text" && "$float8" train --device cpu --data crates --data kernels --data models --steps 300 "$@" \
        --set training.log_every=5 --set training.eval_every=50 --set training.metrics="$file")
    # Timings belong to one machine.
    sed -E -i 's/,"(tokens_per_second|tflops|memory_bytes)":[^,}]*//g' "$file"
}

run f32.jsonl --precision f32
run bf16.jsonl --precision bf16
for recipe in tensorwise rowwise rowwise_with_gw_hp delayed blockwise mxfp8 mxfp8_wgrad_with_hp; do
    run fp8/$recipe.jsonl --recipe $recipe
done
# The command of docs/dev/benches.md.
$(grep -o 'float8 plot docs/curves.*' docs/dev/benches.md | sed "s#^float8#$float8#")

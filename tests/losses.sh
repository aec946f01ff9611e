#!/usr/bin/env bash
# Losses of 12 steps, or of 6 with accumulation, of the debug Llama on the CPU: a change of structure gives the same text on the same machine, before and after.
#
#   tests/losses.sh PROGRAM > after; diff before after
set -euo pipefail
program=$(realpath "$1")
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
seq -f 'line %.0f of a text that every machine has' 1 20000 >text

# losses NAME STEPS ARGUMENT..: losses, gradient norms and evaluations of a run.
losses() {
    echo "== $1"
    "$program" train --device cpu --data text --steps "$2" --set training.log_every=1 --set training.eval_batches=2 \
        --set generate.max_new_tokens=0 --set data.cache=cache "${@:3}" 2>&1 |
        sed -nE 's/^(step: *[0-9]+  loss: *[0-9.]+  grad_norm: *[0-9.]+).*/\1/p; s/.*(validation loss: *[0-9.]+).*/\1/p'
}

for recipe in tensorwise rowwise rowwise_with_gw_hp delayed blockwise mxfp8 mxfp8_wgrad_with_hp; do
    losses "$recipe" 12 --recipe $recipe
    losses "$recipe, accumulation" 6 --recipe $recipe --set training.grad_accumulation=3
    losses "$recipe, evaluation and a schedule" 12 --recipe $recipe --set training.eval_every=3 \
        --set optimizer.warmup_steps=4
done

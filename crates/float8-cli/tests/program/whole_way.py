#!/usr/bin/env python3
"""Reads what whole_way.rs exports to the folder DIR, with PEFT and transformers: the test runs it with FLOAT8_PYTHON.

    pip install torch==2.15.0 transformers==5.24.0 peft==0.21.2 compressed-tensors==0.20.0 accelerate==1.15.0
    FLOAT8_PYTHON=python3 cargo test --release --workspace --test program whole_way

Both must find every tensor, and no other. PEFT's adapter on the base, merged by PEFT, must have the logits of our merge,
up to the FP8 codes of the base that the adapter was trained on; the FP8 export is near it.
"""
import sys
from pathlib import Path

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

FOLDER = Path(sys.argv[1])


def load(name):
    model, info = AutoModelForCausalLM.from_pretrained(
        FOLDER / name, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not any(info.values()), (name, info)
    return model.eval()


def logits(model):
    positions = torch.arange(48).reshape(2, 24)
    with torch.no_grad():
        return model((7 * positions * positions + 3 * positions) % 256).logits


def check(what, got, want, bound):
    error = ((got - want).abs().max() / want.abs().max()).item()
    print(f"{what}: at most {error:.1e} of the largest logit")
    assert error <= bound, (what, error)


merged, base = logits(load("merged")), load("base")
plain = logits(base)
adapted = PeftModel.from_pretrained(base, FOLDER / "adapter").eval()
changed = ((plain - merged).abs().max() / merged.abs().max()).item()
print(f"the adapter changes the logits by {changed:.1e} of the largest")
check("the adapter in PEFT and our merge", logits(adapted), merged, changed / 4)
check("the adapter in PEFT, and merged by PEFT", logits(adapted.merge_and_unload()), logits(adapted), 1e-5)
check("our FP8 export and our merge", logits(load("fp8")), merged, 0.1)

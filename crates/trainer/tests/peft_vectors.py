#!/usr/bin/env python3
"""Makes and checks the vectors of tests/suite/lora.rs: PEFT's adapter on goldens/hf_llama and its logits; ours in PEFT.

    pip install torch==2.15.0 transformers==5.24.0 peft==0.21.2
    python3 peft_vectors.py        makes vectors/peft
    python3 peft_vectors.py DIR    checks DIR, an adapter that this crate has written: the test runs it where Python has the packages

The second wants PEFT to find every tensor of the adapter, and no other, and to give the logits that are beside it.
"""
import sys
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

HERE = Path(__file__).parent
BASE = HERE / "../../../tests/goldens/hf_llama"
OUT = HERE / "vectors/peft"


def logits(model):
    positions = torch.arange(48).reshape(2, 24)
    input_ids = (7 * positions * positions + 3 * positions) % model.config.vocab_size
    with torch.no_grad():
        return input_ids, model(input_ids).logits


def base():
    return LlamaForCausalLM.from_pretrained(BASE, dtype=torch.float32, attn_implementation="eager").eval()


def make():
    torch.manual_seed(3)
    config = LoraConfig(
        r=4, lora_alpha=6, lora_dropout=0.1, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM"
    )
    model = get_peft_model(base(), config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    model.eval()
    model.peft_config["default"].base_model_name_or_path = "hf_llama"
    model.save_pretrained(OUT)
    (OUT / "README.md").unlink(missing_ok=True)
    input_ids, expected = logits(model)
    plain = logits(base())[1]
    print("max difference from the base:", (expected - plain).abs().max().item())
    save_file({"input_ids": input_ids.to(torch.int32), "logits": expected.contiguous()}, OUT / "reference.safetensors")


def check(folder):
    model = PeftModel.from_pretrained(base(), folder).eval()
    ours = load_file(folder / "adapter_model.safetensors")
    theirs = {name.replace(".default", ""): p for name, p in model.named_parameters() if "lora_" in name}
    assert set(ours) == set(theirs), set(ours) ^ set(theirs)
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name].detach()), name
    reference = load_file(folder / "reference.safetensors")
    input_ids, got = logits(model)
    assert torch.equal(input_ids.to(torch.int32), reference["input_ids"])
    error = (got - reference["logits"]).abs().max() / got.abs().max()
    print("largest difference of logits, relative:", error.item())
    assert error < 1e-5, error


if len(sys.argv) > 1:
    check(Path(sys.argv[1]))
else:
    make()

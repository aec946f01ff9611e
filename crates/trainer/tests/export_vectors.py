#!/usr/bin/env python3
"""Makes the reference vectors of tests/suite/exports.rs: transformers' logits of the models that the test exports.

    pip install torch==2.15.0 transformers==5.23.0
    FLOAT8_EXPORT_VECTORS=DIR cargo test -p trainer --test suite exports::transformers
    python3 export_vectors.py DIR

DIR then holds each model in f32 and in bf16. transformers must find every tensor, and no other, and the bf16 weights must be
the f32 ones as torch rounds them.
"""
import hashlib
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import LlamaForCausalLM

OUT = Path(__file__).parent / "vectors"


def load(folder, dtype):
    model, info = LlamaForCausalLM.from_pretrained(
        folder, dtype="auto", attn_implementation="eager", output_loading_info=True
    )
    assert not any(info.values()), info
    assert model.dtype == model.config.dtype == dtype, (model.dtype, model.config.dtype)
    return model.eval()


def sha256(folder):
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def main(folder):
    for name in ["untied", "tied"]:
        folders = {"f32": folder / f"{name}-f32", "bf16": folder / f"{name}-bf16"}
        model = load(folders["f32"], torch.float32)
        rounded = load(folders["bf16"], torch.bfloat16).state_dict()
        for key, value in model.state_dict().items():
            assert torch.equal(rounded[key], value.to(torch.bfloat16)), key
        config = model.config
        assert config.tie_word_embeddings == (name == "tied")
        print(name, getattr(config, "rope_parameters", None) or config.rope_scaling)

        positions = torch.arange(48).reshape(2, 24)
        input_ids = (7 * positions * positions + 3 * positions) % config.vocab_size
        with torch.no_grad():
            logits = model(input_ids).logits
        assert logits.dtype == torch.float32
        save_file(
            {"input_ids": input_ids.to(torch.int32), "logits": logits.contiguous()},
            OUT / f"{name}.safetensors",
            metadata={f"sha256_{dtype}": sha256(path) for dtype, path in folders.items()},
        )


main(Path(sys.argv[1]))

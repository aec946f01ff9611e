#!/usr/bin/env python3
"""Reads the FP8 folders that tests/suite/float8_python.rs exports, as others read them, and makes its reference vectors.

    pip install torch==2.15.0 transformers==5.24.0 compressed-tensors==0.20.0 accelerate==1.15.0
    FLOAT8_EXPORT_VECTORS=DIR cargo test -p trainer --test suite float8_python
    python3 float8_vectors.py DIR

DIR then holds a folder for each recipe. Of each, compressed-tensors' dequantizer, with the scheme that the folder's config.json says,
gives the weights of linears in FP8; of blocks, its own scheme of blocks. transformers loads every folder: it must find every tensor, and no
other; in blocks its weights must be the same bits. With --check nothing is written: what the vectors say must hold.
"""
import hashlib
import json
import sys
from pathlib import Path

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

OUT = Path(__file__).parent / "vectors" / "float8.safetensors"
RECIPES = ["tensorwise", "delayed", "rowwise", "blockwise", "mxfp8"]
# What compressed-tensors calls the blocks of `quant_method: fp8`.
BLOCKS = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]},
            "input_activations": {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 128, "dynamic": True},
        }
    },
}


def dequantized(folder):
    """The weights of linears in FP8, by name, in f32."""
    said = json.loads((folder / "config.json").read_text())["quantization_config"]
    config = QuantizationConfig.model_validate(BLOCKS if said["quant_method"] == "fp8" else said)
    scheme = config.config_groups["group_0"]
    compressor = BaseCompressor.get_value_from_registry(config.format)
    tensors = load_file(folder / "model.safetensors")
    weights = {}
    for name, codes in tensors.items():
        if codes.dtype == torch.float8_e4m3fn:
            linear = name.removesuffix(".weight")
            scale = tensors.get(f"{linear}.weight_scale", tensors.get(f"{linear}.weight_scale_inv"))
            weight = compressor.decompress({"weight": codes, "weight_scale": scale}, scheme)["weight"]
            weights[name] = weight.to(torch.float32)
    assert len(weights) == 14, len(weights)
    return weights


def transformers_model(folder):
    model, info = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not any(info.values()), info
    return model.eval()


def transformers_logits(folder, weights, input_ids):
    """The logits of the folder in blocks, whose weights transformers decodes."""
    model = transformers_model(folder)
    parameters = dict(model.named_parameters())
    for name, weight in weights.items():
        assert torch.equal(parameters[name], weight), f"{folder.name}: {name} differs in transformers"
    with torch.no_grad():
        return model(input_ids).logits


def main(folder, check):
    metadata = {}
    for recipe in RECIPES:
        weights = dequantized(folder / recipe)
        digest = hashlib.sha256()
        for name in sorted(weights):
            digest.update(weights[name].contiguous().numpy().tobytes())
        metadata[recipe] = hashlib.sha256((folder / recipe / "model.safetensors").read_bytes()).hexdigest()
        metadata[f"{recipe} weights"] = digest.hexdigest()
        if recipe == "blockwise":
            positions = torch.arange(48).reshape(2, 24)
            input_ids = (7 * positions * positions + 3 * positions) % 288
            logits = transformers_logits(folder / recipe, weights, input_ids)
        else:
            transformers_model(folder / recipe)
    if check:
        with safe_open(OUT, "pt") as kept:
            assert kept.metadata() == metadata, "the vectors were made of other folders, or say other weights"
            assert torch.allclose(kept.get_tensor("logits"), logits, rtol=0, atol=1e-5 * logits.abs().max().item())
        print("compressed-tensors and transformers read the folders as the vectors say")
    else:
        tensors = {"input_ids": input_ids.to(torch.int32), "logits": logits.contiguous()}
        save_file(tensors, OUT, metadata=metadata)


main(Path(sys.argv[-1]), "--check" in sys.argv)

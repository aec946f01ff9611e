"""Writes tests/vectors: tiny random models of each architecture but Llama, as transformers saves them, with their logits, loss and
greedy tokens in f32. Needs torch, transformers and safetensors; run once, in this folder: `python vectors.py`."""

from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import (
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

for name, config, model, own in [
    ("qwen3", Qwen3Config, Qwen3ForCausalLM, {"head_dim": 16, "tie_word_embeddings": False}),
    ("qwen3-tied", Qwen3Config, Qwen3ForCausalLM, {"head_dim": 16, "tie_word_embeddings": True}),
    ("qwen2", Qwen2Config, Qwen2ForCausalLM, {"tie_word_embeddings": True}),
    ("mistral", MistralConfig, MistralForCausalLM, {"head_dim": 16, "sliding_window": None}),
]:
    folder = Path(__file__).parent / "vectors" / name
    if folder.exists():
        continue
    torch.manual_seed(7)
    config = config(
        vocab_size=160, hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, rope_theta=1_000_000.0, attn_implementation="eager",
        dtype=torch.float32, bos_token_id=None, eos_token_id=None, **own,
    )
    model = model(config).eval()
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            # Norms too are not ones, and logits far enough apart that greedy tokens do not hang on the last bit.
            parameter.normal_(1.0 if "norm" in path else 0.0, 0.1)
        ids = torch.randint(0, config.vocab_size, (2, 24))
        out = model(ids, labels=ids)
        greedy = model.generate(ids[:1, :8], max_new_tokens=12, do_sample=False, pad_token_id=0)[0, 8:]
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    save_file({"input_ids": ids.int(), "logits": out.logits.contiguous(), "loss": out.loss.reshape(1), "greedy": greedy.int()},
              folder / "reference.safetensors")

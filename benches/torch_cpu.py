"""Training steps of a small Llama on the CPU: torch, torchao's `tensorwise` in emulation, and this project's program, in turn.

    python benches/torch_cpu.py --program target/release/float8 --data TEXT

Needs torch, and torchao for its row. Rounds take turns, so that a busy machine slows all alike; of each row the median of its
rounds counts. Prints a table, or a line of JSON for each row with --json.
"""

import argparse
import importlib.util
import json
import os
import pathlib
import statistics
import subprocess
import tempfile
import time

import torch
import torch.nn.functional as F
from torch import nn

# Bytes and a separator fit in the vocabulary.
HIDDEN, LAYERS, HEADS, KV_HEADS, FFN, VOCAB = 256, 4, 8, 4, 704, 288
BATCH, SEQ_LEN = 8, 256
WARM_UP = 2


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.dim = HIDDEN // HEADS
        self.q_proj = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.k_proj = nn.Linear(HIDDEN, KV_HEADS * self.dim, bias=False)
        self.v_proj = nn.Linear(HIDDEN, KV_HEADS * self.dim, bias=False)
        self.o_proj = nn.Linear(HIDDEN, HIDDEN, bias=False)

    def rotate(self, x, cos, sin):
        first, second = x.chunk(2, -1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

    def forward(self, x, cos, sin):
        batch, length, _ = x.shape
        q, k, v = (proj(x).view(batch, length, -1, self.dim).transpose(1, 2) for proj in (self.q_proj, self.k_proj, self.v_proj))
        y = F.scaled_dot_product_attention(
            self.rotate(q, cos, sin), self.rotate(k, cos, sin), v, is_causal=True, enable_gqa=True
        )
        return self.o_proj(y.transpose(1, 2).reshape(batch, length, -1))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = nn.RMSNorm(HIDDEN), nn.RMSNorm(HIDDEN)
        self.self_attn = Attention()
        self.gate_proj = nn.Linear(HIDDEN, FFN, bias=False)
        self.up_proj = nn.Linear(HIDDEN, FFN, bias=False)
        self.down_proj = nn.Linear(FFN, HIDDEN, bias=False)

    def forward(self, x, cos, sin):
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        h = self.post_attention_layernorm(x)
        return x + self.down_proj(F.silu(self.gate_proj(h)) * self.up_proj(h))


class Llama(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(HIDDEN)
        self.lm_head = nn.Linear(HIDDEN, VOCAB, bias=False)
        dim = HIDDEN // HEADS
        angles = torch.outer(torch.arange(SEQ_LEN), 500000.0 ** -(torch.arange(0, dim, 2) / dim))
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, tokens):
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        return self.lm_head(self.norm(x))


def torch_row(float8, steps):
    """A call that makes `steps` training steps and gives tokens per second."""
    torch.manual_seed(0)
    model = Llama()
    if float8:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        config = Float8LinearConfig(emulate=True)
        convert_to_float8_training(model, config=config, module_filter_fn=lambda _, name: name != "lm_head")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, foreach=True)
    tokens = torch.randint(0, VOCAB, (BATCH, SEQ_LEN + 1))

    def step():
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    for _ in range(WARM_UP):
        step()

    def run():
        start = time.perf_counter()
        for _ in range(steps):
            step()
        return steps * BATCH * SEQ_LEN / (time.perf_counter() - start)

    return run


def program_row(program, data, precision, recipe, steps):
    """A call that trains by the program, and gives tokens per second of its steps after the first ones."""
    settings = {
        "model.overrides.hidden_size": HIDDEN,
        "model.overrides.num_hidden_layers": LAYERS,
        "model.overrides.num_attention_heads": HEADS,
        "model.overrides.num_key_value_heads": KV_HEADS,
        "model.overrides.head_dim": HIDDEN // HEADS,
        "model.overrides.intermediate_size": FFN,
        "model.overrides.vocab_size": VOCAB,
        "training.batch_size": BATCH,
        "training.seq_len": SEQ_LEN,
        "training.log_every": 1,
        "training.eval_batches": 1,
        "generate.max_new_tokens": 0,
    }

    def run():
        with tempfile.TemporaryDirectory() as folder:
            metrics = pathlib.Path(folder) / "metrics.jsonl"
            command = [program, "train", "--device", "cpu", "--precision", precision, "--steps", str(WARM_UP + steps)]
            command += ["--recipe", recipe] if recipe else []
            command += [part for path in data for part in ("--data", path)]
            command += [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
            command += ["--output-dir", folder, "--set", "checkpoint.save_steps=0"]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            lines = [json.loads(line) for line in metrics.read_text().splitlines()]
        speeds = [line["tokens_per_second"] for line in lines if line.get("tokens_per_second")][WARM_UP:]
        return statistics.harmonic_mean(speeds)

    return run


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", help="this project's llama3; without it torch alone is measured")
    parser.add_argument("--data", action="append", default=[], help="what the program trains on; repeatable")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=8, help="of a round")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(os.cpu_count())

    rows = {"torch, f32": torch_row(False, args.steps)}
    if importlib.util.find_spec("torchao"):
        rows["torchao, tensorwise (emulated)"] = torch_row(True, args.steps)
    if args.program:
        rows["burn-float8, f32"] = program_row(args.program, args.data, "f32", None, args.steps)
        for recipe in ("tensorwise", "rowwise"):
            rows[f"burn-float8, {recipe}"] = program_row(args.program, args.data, "fp8", recipe, args.steps)
    speeds = {name: [] for name in rows}
    for _ in range(args.rounds):
        for name, run in rows.items():
            speeds[name].append(run())
    first = statistics.median(speeds["torch, f32"])
    for name, values in speeds.items():
        median = statistics.median(values)
        if args.json:
            print(json.dumps({"name": name, "tokens_per_second": round(median), "ratio": round(median / first, 3)}))
        else:
            print(f"{name:<32} {median:>8.0f} tokens/s  {median / first:.2f}")


if __name__ == "__main__":
    main()

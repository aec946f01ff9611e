#!/usr/bin/env python3
"""Makes the reference vectors of tests/data/tokenizers.rs: ids that the Python originals give to the strings of strings.jsonl.

    pip install tokenizers==0.23.3 tiktoken==0.14.0 && pip install --no-deps llama-models==0.3.0
    python3 vectors.py

tokenizer.json is trained here, on the repository's own documents, with Llama 3's way to split text: Llama's is not ours to
commit. The ids of Llama 3's tokenizer.model are those of the package llama-models, which brings the file.
"""
import hashlib
import importlib.util
import json
import random
import subprocess
import sys
import types
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

HERE = Path(__file__).parent
OUT = HERE / "vectors"
ROOT = HERE.parents[2]
SPECIAL = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def train():
    tokenizer = Tokenizer(models.BPE(ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1000,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL],
        show_progress=False,
    )
    files = sorted(str(path) for path in ROOT.glob("*.md")) + sorted(str(path) for path in ROOT.glob("models/*/src/*.rs"))
    tokenizer.train(files, trainer)
    tokenizer.add_tokens(["burn-float8"])
    bos = SPECIAL[0]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))]
    )
    tokenizer.save(str(OUT / "tokenizer.json"), pretty=False)
    return tokenizer


def strings():
    rng = random.Random(8)
    planes = [(0x20, 0x7E), (0xA0, 0x2FF), (0x370, 0x5FF), (0x600, 0xDFF), (0xE00, 0x1FFF), (0x2000, 0x2BFF), (0x3040, 0x9FFF)]
    planes += [(0xAC00, 0xD7A3), (0xE000, 0xF8FF), (0xFB00, 0xFFFD), (0x10000, 0x1FFFF), (0x20000, 0x2FFFF), (0x30000, 0x3FFFF)]
    planes += [(0x40000, 0xDFFFF), (0xE0000, 0xEFFFF), (0xF0000, 0xFFFFF), (0x100000, 0x10FFFF)]
    spaces = [" ", "  ", "\t", "\n", "\r\n", "\n\n", "\u00a0", "\u2003", "\u3000", "\u0085", "\u001c", "\u200b"]
    text = (ROOT / "README.md").read_text()
    words = text.split()

    def chars(low, high, n):
        return "".join(chr(rng.randint(low, high)) for _ in range(n))

    out = ["", " ", "\n", "a", "\ufffd", "\0", "it's IT'S we'll WE'LL", "1234567890", "x" * 300, "naïve café", "👩‍👩‍👧‍👦🏳️‍🌈", "e\u0301\u0301"]
    out += [" " * n for n in (2, 7, 80, 300)] + ["\n" * n for n in (2, 7, 80)] + [" \n" * 40, "\t" * 33 + "x", "a" + " " * 99 + "b"]
    # Beyond the 25,000 characters in a row, white or not, and the 400,000 at all, that the original of Llama 3 splits at.
    out += [" " * 25_010 + "x", "ab" * 12_510, "a b c d\n" * 50_005]
    for low, high in planes:
        out += [chars(low, high, rng.randint(1, 24)) for _ in range(24)]
    for _ in range(300):
        pieces = [rng.choice(words + spaces + SPECIAL + ["burn-float8"]) for _ in range(rng.randint(1, 16))]
        out.append(rng.choice(["", " "]).join(pieces))
    for _ in range(300):
        pieces = [chars(*rng.choice(planes), rng.randint(1, 4)) + rng.choice(spaces + [""]) for _ in range(rng.randint(1, 10))]
        out.append("".join(pieces))
    for token in SPECIAL:
        out += [token, token * 2, f" {token} ", f"x{token}y", token[:-1], token[1:], f"{token}\n\nuser", token.upper()]
    out += [line for line in text.splitlines() if line.strip()][:100]
    return out


def llama3():
    """The package's tokenizer, without its __init__, which imports all of the package."""
    spec = importlib.util.find_spec("llama_models")
    root = Path(spec.submodule_search_locations[0])
    for name, folder in (("llama_models", root), ("llama_models.llama3", root / "llama3")):
        module = types.ModuleType(name)
        module.__path__ = [str(folder)]
        sys.modules[name] = module
    from llama_models.llama3.tokenizer import Tokenizer as Original

    path = root / "llama3" / "tokenizer.model"
    return Original(path), hashlib.sha256(path.read_bytes()).hexdigest()


def write(name, rows):
    lines = [json.dumps(row, ensure_ascii=isinstance(row, str), separators=(",", ":")) for row in rows]
    (OUT / name).write_text("\n".join(lines) + "\n")


def short(ids):
    """Ids of the few very long strings by their number and a hash, so that the file stays small."""
    if len(ids) <= 2000:
        return ids
    packed = b"".join(id.to_bytes(4, "little") for id in ids)
    return {"len": len(ids), "sha256": hashlib.sha256(packed).hexdigest()}


def main():
    OUT.mkdir(exist_ok=True)
    tokenizer, texts = train(), strings()
    # Long strings repeat something, and are written as that.
    write("strings.jsonl", [compact(text) for text in texts])
    for name, is_text in (("hf_text", True), ("hf_special", False)):
        tokenizer.encode_special_tokens = is_text
        ids = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
        write(f"{name}.jsonl", [short(row) for row in ids])
        assert all(tokenizer.decode(row, skip_special_tokens=False) == text for row, text in zip(ids, texts))
    original, digest = llama3()
    for name, allowed in (("llama3_text", set()), ("llama3_special", "all")):
        ids = [original.encode(text, bos=False, eos=False, allowed_special=allowed) for text in texts]
        write(f"{name}.jsonl", [short(row) for row in ids])
    # Ids that are not the ids of a text: what the originals make of bytes that are no UTF-8.
    rng = random.Random(16)
    rows = [[rng.randrange(256) for _ in range(rng.randint(1, 12))] for _ in range(300)]
    alphabet = [tokenizer.token_to_id(token) for token in sorted(pre_tokenizers.ByteLevel.alphabet())]
    write("broken_hf.jsonl", [{"ids": (ids := [alphabet[b] for b in row]), "text": tokenizer.decode(ids)} for row in rows])
    write("broken_llama3.jsonl", [{"ids": row, "text": original.decode(row)} for row in rows])
    print(len(texts), "strings; tokenizer.model is", digest)


def compact(text):
    for period in (1, 2, 8):
        if len(text) > 5000 and text[:-1] == (text[:period] * len(text))[: len(text) - 1]:
            times = (len(text) - 1) // period
            return {"repeat": text[:period], "times": times, "then": text[period * times :]}
    return text


if __name__ == "__main__":
    main()

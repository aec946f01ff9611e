"""torch on the shapes of `float8-gpu bench`: torch._scaled_mm in all its FP8 modes, bf16 matmul, grouped GEMMs, a bf16
linear, causal attention, a copy.

Timing: batches of calls between two CUDA events after a warm-up, medians; normal-distributed inputs that rotate through
more memory than an L2 cache holds. A batch waits behind a kernel that keeps the device busy until the host has issued it, as
our batches do. Prints a line of JSON for each result, as it is known; a mode that torch refuses for a
shape is null.
"""

import argparse
import functools
import json
import statistics
import sys
import time

import torch

BATCH_SECONDS = 0.03
MOST_CALLS = 500
ROTATION = 128 << 20
MOST_SETS = 16


def sets(size):
    return max(1, min(MOST_SETS, -(-ROTATION // max(size, 1))))


def timed(work):
    """Seconds of `work` on the device."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    work(start)
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) * 1e-3


@functools.cache
def blocker():
    """Cycles for which the device sleeps before a batch, as long as one takes."""
    cycles = 1 << 22

    def sleep(start):
        start.record()
        torch.cuda._sleep(cycles)

    timed(sleep)
    return int(cycles * BATCH_SECONDS / timed(sleep))


def seconds(call, repeat):
    """Median seconds of `call(turn)`."""
    turn = 0

    def batch(calls):
        """Seconds of a call on the device, and on the host until it returns."""
        issued = 0.0

        def work(start):
            nonlocal turn, issued
            torch.cuda._sleep(blocker())
            start.record()
            begin = time.perf_counter()
            for _ in range(calls):
                call(turn)
                turn += 1
            issued = time.perf_counter() - begin

        return timed(work) / calls, issued / calls

    batch(1)
    batch(2)
    taken, issued = batch(8)
    # As many as the host issues while the device is busy with the blocker.
    calls = max(1, min(MOST_CALLS, int(BATCH_SECONDS / taken), int(BATCH_SECONDS / issued)))
    batch(calls)
    return statistics.median(batch(calls)[0] for _ in range(repeat))


def fp8(rows, cols):
    """Normal values in e4m3 under one scale, as our benchmark has them."""
    x = torch.randn(rows, cols, device="cuda", dtype=torch.bfloat16)
    return (x * (448.0 / 5.0)).clamp(-448, 448).to(torch.float8_e4m3fn)


def gemm(m, n, k, repeat):
    def rate(call):
        return 2.0 * m * n * k / seconds(call, repeat) * 1e-12

    row = {"shape": [m, n, k]}
    pairs = [(fp8(m, k), fp8(n, k).t()) for _ in range(sets((m + n) * k))]
    one = torch.full((), 0.01, device="cuda")
    by_row, by_col = torch.full((m, 1), 0.01, device="cuda"), torch.full((1, n), 0.01, device="cuda")
    modes = {
        "precise": (one, one, False),
        "fast": (one, one, True),
        "rowwise": (by_row, by_col, False),
        "rowwise_fast": (by_row, by_col, True),
    }
    for mode, (scale_a, scale_b, fast) in modes.items():

        def call(turn):
            a, b = pairs[turn % len(pairs)]
            torch._scaled_mm(
                a, b, scale_a=scale_a, scale_b=scale_b, out_dtype=torch.bfloat16, use_fast_accum=fast
            )

        try:
            row[mode] = rate(call)
        except (RuntimeError, ValueError) as error:
            print(f"{mode} {m}x{n}x{k}: {error}", file=sys.stderr)
            row[mode] = None
    del pairs
    halves = [
        (
            torch.randn(m, k, device="cuda", dtype=torch.bfloat16),
            torch.randn(n, k, device="cuda", dtype=torch.bfloat16).t(),
        )
        for _ in range(sets(2 * (m + n) * k))
    ]
    row["bf16"] = rate(lambda turn: torch.mm(*halves[turn % len(halves)]))
    return row


def grouped(grouping, x, y, sizes, repeat):
    """Groups of rows [tokens, y] by matrices [x, y], or of the contraction of [x, tokens] and [y, tokens]."""
    count, tokens = len(sizes), sum(sizes)
    if grouping == "rows":
        m, n, k = tokens, x, y
        rows_b, length, align = count * n, k, 1
        scales = torch.full((m,), 0.01, device="cuda"), torch.full((count, n), 0.01, device="cuda")
    else:
        # Every group has scales of its own, and torch wants its groups at multiples of 16.
        m, n, k = x, y, tokens
        align = 16
        rows_b, length = n, sum(-(-size // align) * align for size in sizes)
        scales = torch.full((count * m,), 0.01, device="cuda"), torch.full((count * n,), 0.01, device="cuda")
    ends, end = [], 0
    for size in sizes:
        end += -(-size // align) * align
        ends.append(end)
    offs = torch.tensor(ends, device="cuda", dtype=torch.int32)

    def pairs(make, width):
        def right():
            b = make(rows_b, length)
            return b.view(count, n, length).transpose(-2, -1) if grouping == "rows" else b.t()

        return [(make(m, length), right()) for _ in range(sets(width * (m + rows_b) * length))]

    def bf16(rows, cols):
        return torch.randn(rows, cols, device="cuda", dtype=torch.bfloat16)

    def scaled(fast):
        return lambda a, b: torch._scaled_grouped_mm(
            a, b, *scales, offs=offs, out_dtype=torch.bfloat16, use_fast_accum=fast
        )

    modes = {
        "rowwise": (fp8, 1, scaled(False)),
        "rowwise_fast": (fp8, 1, scaled(True)),
        "bf16": (bf16, 2, lambda a, b: torch._grouped_mm(a, b, offs=offs)),
    }
    row = {"grouping": grouping, "sizes": sizes, "shape": [m, n, k]}
    for mode, (make, width, call) in modes.items():
        inputs = pairs(make, width)
        try:
            taken = seconds(lambda turn: call(*inputs[turn % len(inputs)]), repeat)
            row[mode] = 2.0 * m * n * k / taken * 1e-12
        except (AttributeError, RuntimeError, TypeError, ValueError) as error:
            print(f"grouped {mode} {grouping} {m}x{n}x{k}: {error}", file=sys.stderr)
            row[mode] = None
        del inputs
    return row


def linear(m, k, n, repeat):
    """Forward and backward in bf16."""
    inputs = []
    for _ in range(max(2, sets(2 * (m * k + k * n + m * n)))):
        x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        w = (0.02 * torch.randn(n, k, device="cuda", dtype=torch.bfloat16)).requires_grad_()
        inputs.append((x, w, torch.randn(m, n, device="cuda", dtype=torch.bfloat16)))

    def call(turn):
        x, w, dy = inputs[turn % len(inputs)]
        torch.autograd.grad(torch.nn.functional.linear(x, w), (x, w), dy)

    return {"shape": [m, k, n], "bf16": seconds(call, repeat) * 1e3}


def attention(batch, heads, length, dim, repeat):
    """Causal attention in bf16, forward and backward, in milliseconds: the faster of FlashAttention and cuDNN."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    inputs = [
        torch.randn(batch, heads, length, dim, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3)
    ]
    dy = torch.randn(batch, heads, length, dim, device="cuda", dtype=torch.bfloat16)
    row = {"shape": [batch, heads, length, dim]}
    for name, backend in [("flash", SDPBackend.FLASH_ATTENTION), ("cudnn", SDPBackend.CUDNN_ATTENTION)]:

        def call(turn):
            with sdpa_kernel(backend):
                y = torch.nn.functional.scaled_dot_product_attention(*inputs, is_causal=True)
            torch.autograd.grad(y, inputs, dy)

        try:
            row[name] = seconds(call, repeat) * 1e3
        except RuntimeError as error:
            print(f"attention {name} {row['shape']}: {error}", file=sys.stderr)
            row[name] = None
    row["bf16"] = min((row[name] for name in ("flash", "cudnn") if row[name]), default=None)
    return row


def copy(repeat):
    """GB/s, reads and writes."""
    size = 512 << 20
    pairs = [
        (
            torch.randint(256, (size,), device="cuda", dtype=torch.uint8),
            torch.empty(size, device="cuda", dtype=torch.uint8),
        )
        for _ in range(2)
    ]

    def call(turn):
        source, target = pairs[turn % 2]
        target.copy_(source)

    return 2 * size / seconds(call, repeat) * 1e-9


def shapes(text):
    return [tuple(int(part) for part in shape.split("x")) for shape in text.split(",") if shape]


def groups(text):
    def parse(case):
        grouping, rest, sizes = case.split(":")
        return (grouping, *(int(part) for part in rest.split("x")), [int(size) for size in sizes.split("+")])

    return [parse(case) for case in text.split(",") if case]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gemm", type=shapes, default=[(n, n, n) for n in (1024, 2048, 4096, 8192)], help="MxNxK,..")
    parser.add_argument("--linear", type=shapes, default=[(8192, 4096, 4096), (8192, 8192, 8192)], help="MxKxN,..")
    parser.add_argument("--grouped", type=groups, default=[], help="rows:NxK:SIZE+SIZE.. or contraction:MxN:SIZE+..,..")
    parser.add_argument("--beside", type=shapes, default=[(4, 32, 2048, 128)], help="attention: BxHxTxd,..")
    parser.add_argument("--only", default="gemm,grouped,quantize,linear,beside", help="parts, separated by commas")
    parser.add_argument("--repeat", type=int, default=7)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("torch finds no CUDA device")
    torch.manual_seed(0)
    only = args.only.split(",")

    def say(kind, result):
        print(json.dumps({kind: result}), flush=True)

    say("version", torch.__version__)
    say("device", torch.cuda.get_device_name())
    for part, measure in [("gemm", gemm), ("linear", linear), ("grouped", grouped), ("beside", attention)]:
        for shape in getattr(args, part) if part in only else []:
            say(part, measure(*shape, args.repeat))
            torch.cuda.empty_cache()
    if "quantize" in only:
        say("copy_gb_per_s", copy(args.repeat))


if __name__ == "__main__":
    main()

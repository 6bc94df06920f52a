"""What does arbitrary conditioning cost? Speed and memory, measured side by side in one run.

    python bench.py                               configs/small.py in micro-batches of 4, all parts
    python bench.py configs/tiny.py --what=train  one part: train, memory, nll, sample, data
    python bench.py --dtype=bfloat16 --compile    any key of config.py

Trust the ratios: what is compared takes turns, round after round, and the median of the rounds is printed. Seconds depend
on the machine and on what else it does. Tokens are random, nothing is read but for `data`, and nothing is written. Dropout is
0 unless you give it: the CPU's fused attention has none. `Naive` is what a first version of AC-GPT looks like.
"""

import contextlib
import functools
import io
import multiprocessing
import os
import re
import statistics
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F
from tqdm import tqdm

import fast
import prepare_data
from baselines import METHODS
from checkpoint import autocast, build
from conditioning import augment, draw_cond
from config import UserError, key, load_config, parse, resolve_machine, run
from model import ACGPT, GPT, ac_mask
from train import draw_step, make_optimizer

R_MAX = (0.2, 0.6, 1.0)

# ---------------------------------------------------------------- what is compared


class Naive(ACGPT):
    """AC-GPT without a shortcut: a dense mask, padding up to the longest, every row through the head."""

    def training_loss(self, tokens, cond):
        T = tokens.size(1)
        slots, positions, present = self.arrange(*self.moved(tokens, cond))
        P = slots.size(1) - T
        logits = self.body.head(self.body(slots, positions, ac_mask(present, P)))  # (B, P + T, V)
        targets = F.pad(self.moved(tokens.masked_fill(cond, -100)), (P, 0), value=-100)  # -100: not scored
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum"), (~cond).sum()


class Plain(nn.Module):
    """A causal language model out of PyTorch's own layers: the same sizes, no rotary positions, nothing of ours."""

    def __init__(self, vocab, config):
        super().__init__()
        D = config.n_embd
        layer = nn.TransformerEncoderLayer(
            D, config.n_head, 4 * D, config.dropout, lambda x: F.gelu(x, approximate="tanh"), batch_first=True, norm_first=True
        )  # fmt: skip
        self.wte = nn.Embedding(vocab, D)
        self.blocks = nn.TransformerEncoder(layer, config.n_layer, nn.LayerNorm(D), enable_nested_tensor=False)
        nn.init.normal_(self.wte.weight, std=0.02)
        self.bos = vocab - 1

    def forward(self, tokens, cond):
        tokens = tokens.to(self.wte.weight.device)
        x = F.pad(tokens[:, :-1], (1, 0), value=self.bos)
        mask = nn.Transformer.generate_square_subsequent_mask(x.size(1), device=x.device)
        logits = F.linear(self.blocks(self.wte(x), mask, is_causal=True), self.wte.weight)
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten(), reduction="sum"), tokens.numel()


def flops(config, vocab, n_copies, n_scored):
    """Floating-point operations of a training step, forward and backward, over sequences with so many copies and scored
    tokens (lists): matrix products and the pairs that attention needs; a product costs twice as much backward.
    """
    D, T, total = config.n_embd, config.block_size, 0
    for P, scored in zip(n_copies, n_scored):
        pairs = P * P + P * T + T * (T + 1) / 2
        in_all_blocks = config.n_layer * (6 * D * D * (P + T) + 4 * D * pairs)  # qkv; scores and mixtures
        total += in_all_blocks + 18 * D * D * ((config.n_layer - 1) * (P + T) + scored) + 2 * D * vocab * scored
    return 3 * total


# ---------------------------------------------------------------- how it is measured


def wait(config):
    if config.device != "cpu":
        getattr(torch, config.device.partition(":")[0]).synchronize()


def take_turns(config, rounds, jobs, quiet=None):
    """jobs {name: function of the round} -> {name: seconds of each round}. Round -1 warms up and is not counted."""
    seconds = {name: [] for name in jobs}
    for i in tqdm(range(-1, rounds), "rounds", leave=False, disable=quiet):
        for name, job in jobs.items():
            wait(config)
            start = time.perf_counter()
            job(i)
            wait(config)
            if i >= 0:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def ratio(a, b):
    """Median over the rounds of a / b."""
    return statistics.median(x / y for x, y in zip(a, b))


def line(what, value, target=""):
    print(f"  {what:66}{value:>14}   {target}".rstrip(), flush=True)


def matmul_rate(config):
    """FLOP/s of the best of a few large matrix products in config.dtype."""
    D, dtype, best = config.n_embd, getattr(torch, config.dtype), 0.0
    shapes = [(2048, 2048, 2048), (4096, D, 4 * D), (4096, 4 * D, D)]
    for m, k, n in [(8192, 8192, 8192)] if config.device != "cpu" else shapes:
        a, b = (torch.randn(shape, device=config.device, dtype=dtype) for shape in ((m, k), (n, k)))
        seconds = take_turns(config, 5, {"": lambda i, a=a, b=b: F.linear(a, b)}, quiet=True)[""]
        best = max(best, 2 * m * k * n / statistics.median(seconds))
    return best


def random_step(config, vocab):
    """The tokens and x_c of one optimizer step, drawn and dealt as in training: lists of micro-batches."""
    N = config.sequences_per_step
    chunks = torch.randint(vocab - 1, (N, config.block_size), generator=torch.Generator().manual_seed(0)).numpy()
    tokens, cond = draw_step(chunks, config, 0)
    return tokens.split(config.batch_size), cond.split(config.batch_size)


def padding_share(micro_batches):
    """Of all slots, when each micro-batch of x_c is filled up to its largest."""
    copies = sum(int(cond.sum()) for cond in micro_batches)
    prefix = sum(len(cond) * int(cond.sum(1).max()) for cond in micro_batches)
    return (prefix - copies) / (prefix + sum(cond.numel() for cond in micro_batches))


def forward_and_backward(model, config, tokens, cond):
    with autocast(config):
        loss, n = model(tokens, cond)
    (loss / n).backward()
    model.zero_grad()


# ---------------------------------------------------------------- the parts


def train(config, vocab, rounds):
    """Training: forward and backward of micro-batches of one step, every few of them."""
    body = build(config, vocab, vocab - 1).body
    if config.compile:
        fast.compile_body(body)
    gpt, ac, naive = (kind(body, vocab - 1).train() for kind in (GPT, ACGPT, Naive))
    plain = Plain(body.wte.num_embeddings, config).to(config.device).train()
    steps = {r: random_step(replace(config, r_max=r), vocab) for r in R_MAX}
    order = torch.randperm(config.sequences_per_step, generator=torch.Generator().manual_seed(1))
    unsorted = [torch.cat(x)[order].split(config.batch_size) for x in steps[0.6]]
    every = max(1, config.gradient_accumulation_steps // rounds)

    def job(model, step):
        def do(i):
            tokens, cond = (x[i * every % len(x)] for x in step)
            n = 1 if i < 0 and config.device == "cpu" and not config.compile else len(tokens)  # a short warm-up
            forward_and_backward(model, config, tokens[:n], cond[:n])

        return do

    optimizer = make_optimizer(gpt, config)
    jobs = {"plain": job(plain, steps[0.6]), "gpt": job(gpt, steps[0.6])}
    jobs |= {r: job(ac, steps[r]) for r in R_MAX} | {"naive": job(naive, unsorted)}
    for p in gpt.parameters():
        p.grad = torch.zeros_like(p)
    optimizer_seconds = take_turns(config, rounds, {"": lambda i: optimizer.step()})[""]
    draw_seconds = take_turns(
        config, rounds, {"": lambda i: [augment(*x, 0) for x in zip(*random_step(config, vocab))]}
    )
    rates = []
    seconds = take_turns(config, rounds, jobs | {"matmul": lambda i: rates.append(matmul_rate(config))})
    peak = statistics.median(rates)

    n = config.batch_size * config.block_size
    gpt_flops = flops(config, vocab, [0] * config.batch_size, [config.block_size] * config.batch_size)
    whole = {r: statistics.median(seconds[r]) * config.gradient_accumulation_steps for r in R_MAX}
    line("independent plain causal step (PyTorch's own layers)", f"{statistics.median(seconds['plain']):.2f} s")
    line("our GPT / the plain one", f"{ratio(seconds['gpt'], seconds['plain']):.2f}", "<= 1.03")
    for r, target in zip(R_MAX, ("", "<= 0.98 (bf16 <= 1.08)", "<= 1.10")):
        known = torch.cat(steps[r][1]).sum(1).tolist()
        ac_flops = flops(config, vocab, known, [config.block_size - x for x in known]) / len(steps[r][1])
        text = f"AC-GPT at r_max {r} / GPT (counting FLOPs predicts {ac_flops / gpt_flops:.2f})"
        line(text, f"{ratio(seconds[r], seconds['gpt']):.2f}", target)
    line("naive AC-GPT at r_max 0.6 / AC-GPT", f"{ratio(seconds['naive'], seconds[0.6]):.2f}", ">= 1.6")
    line("share of padding, naive (ours has none)", f"{padding_share(unsorted[1]):.1%}")
    line("our GPT's share of the matmul peak", f"{gpt_flops / statistics.median(seconds['gpt']) / peak:.2f}", ">= 0.65")
    line(f"the peak, {config.dtype}", f"{peak / 1e9:,.0f} GFLOP/s")
    line("AdamW, share of a step", f"{statistics.median(optimizer_seconds) / whole[0.6]:.2%}")
    line("drawing and augmenting, share of a step", f"{statistics.median(draw_seconds['']) / whole[0.6]:.2%}", "< 3%")
    for name, title in (("gpt", "GPT"), (0.6, "AC-GPT at r_max 0.6")):
        line(f"{title}, body tokens per second", f"{n / statistics.median(seconds[name]):,.0f}")


def peak_bytes(config, vocab, r_max):
    """Memory that micro-batches and an optimizer step need at most; runs in a process of its own. r_max None: GPT."""
    config = replace(config, method="gpt" if r_max is None else "ac_gpt", r_max=r_max or 0.0)
    tokens, cond = random_step(config, vocab)
    before = resident_bytes(config)
    model = build(config, vocab, vocab - 1).train()
    optimizer = make_optimizer(model, config)
    for _ in range(2):  # the second step meets AdamW's moments, its second micro-batch the gradients of the first
        for i in (0, -1):
            with autocast(config):
                model(tokens[i], cond[i])[0].backward()
        optimizer.step()
        optimizer.zero_grad()
    return resident_bytes(config) - before


def resident_bytes(config):
    """The most that this process has held so far; on a GPU, the most that was allocated there."""
    if config.device.startswith("cuda"):
        return torch.cuda.max_memory_allocated(config.device)
    return int(re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024


def memory(config, vocab, rounds):
    """Peak memory of training: weights, gradients, AdamW's moments, activations."""
    if config.device == "mps" or (config.device == "cpu" and not Path("/proc/self/status").exists()):
        line("measured on Linux and on CUDA only", "-")
        return
    used = []
    for r in (None, *R_MAX):
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as child:
            used.append(child.submit(peak_bytes, config, vocab, r).result())
    line("GPT", f"{used[0] / 2**30:.2f} GiB")
    for r, peak in zip(R_MAX, used[1:]):
        line(f"AC-GPT at r_max {r} / GPT", f"{peak / used[0]:.2f}", "<= 1.3" if r == 0.6 else "")


@torch.no_grad()
def nll(config, vocab, rounds):
    """Evaluation: exact_nll of a micro-batch of queries, milliseconds per token that is asked for."""
    (tokens, *_), (cond, *_) = random_step(config, vocab)
    jobs, asked = {}, {}
    for name, kind in METHODS.items():
        if not kind.bound:
            model = build(replace(config, method=name), vocab, vocab - 1).eval()
            known = cond if model.can_condition_on(cond) else cond & False
            # MLM takes a pass for each token, all alike: two tokens of each query will do.
            scored = ~known & ((~known).cumsum(1) <= 2) if name == "mlm" else ~known
            asked[name] = int(scored.sum())

            def job(i, model=model, known=known, scored=scored):
                with autocast(config):
                    model.exact_nll(tokens, known, scored)

            jobs[name] = job
    for name, seconds in take_turns(config, rounds, jobs).items():
        line(f"{name}, {asked[name]:,} tokens", f"{1e3 * statistics.median(seconds) / asked[name]:.3f} ms")


def half_known(config, vocab, T, n):
    """n queries of T tokens, half of them known."""
    tokens = torch.randint(vocab - 1, (n, T), generator=torch.Generator().manual_seed(0))
    half = replace(config, block_size=T, r_min=0.5, r_max=0.5)
    return tokens, draw_cond(half, n, torch.Generator().manual_seed(0))


def cached_seconds(model, config, tokens, cond):
    """generate, once; the last eight tokens alone have warmed it up."""

    def job(i):
        known = cond if i >= 0 else cond | (torch.arange(cond.size(1)) < cond.size(1) - 8)
        with autocast(config):
            model.generate(tokens, known, lambda logits: logits.argmax(-1))

    return take_turns(config, 1, {"": job})[""][0]


def uncached_seconds(model, config, tokens, cond, rounds):
    """What a loop would take that sends all slots so far through the body for each token: measured at five depths."""
    unknown = (~cond[0]).nonzero()[:, 0].tolist()
    slots, positions, _ = model.moved(*model.arrange(tokens, cond))
    P = slots.size(1) - tokens.size(1)

    def job(i, n):
        with autocast(config):
            model.body.head(model.body(slots[0, :n], positions[0, :n], [(P, n)], slice(n - 1, n)))

    depths = [P + t + 1 for t in unknown[len(unknown) // 10 :: max(1, len(unknown) // 5)]]
    seconds = take_turns(config, rounds, {n: functools.partial(job, n=n) for n in depths})
    return len(unknown) * statistics.mean(statistics.median(x) for x in seconds.values())


@torch.no_grad()
def sample(config, vocab, rounds):
    """Sampling with half of the tokens known: `generate`, and a loop without its cache."""
    model, T = build(replace(config, method="ac_gpt"), vocab, vocab - 1).eval(), config.block_size
    per_token = {}
    for n, length in ((1, T // 4), (1, T), (8, T)):
        tokens, cond = half_known(config, vocab, length, n)
        seconds = cached_seconds(model, config, tokens, cond)
        if n == 1:
            per_token[length] = seconds / int((~cond).sum())
        line(f"T = {length}, {n} at a time", f"{int((~cond).sum()) / seconds:,.1f} tokens/s")
    tokens, cond = half_known(config, vocab, T, 1)
    without = uncached_seconds(model, config, tokens, cond, rounds)
    line(f"T = {T}, uncached / cached", f"{without / (per_token[T] * int((~cond).sum())):.1f}", ">= 15")
    line(f"time per token at T = {T} / at T = {T // 4}", f"{per_token[T] / per_token[T // 4]:.2f}", "<= 1.5")


def data(config, vocab, rounds):
    """prepare_data.py's tokenising and writing, against tiktoken alone on all cores."""
    options = prepare_data.Options()
    splits = next(prepare_data.sotu(options, None))[0]
    documents = [text for texts in splits.values() for text in texts]
    tokenizer = prepare_data.GPT2()

    def whole(i):
        prepare_data.prepare(replace(config, dataset="sotu", tokenizer="gpt2", data_dir=f"{folder}/{i}"), options)

    jobs = {
        "tiktoken": lambda i: tokenizer.bpe.encode_ordinary_batch(documents, num_threads=os.cpu_count()),
        "ours": whole,
    }
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        seconds = take_turns(config, rounds, jobs)
    share = ratio(seconds["tiktoken"], seconds["ours"])
    line("tiktoken.encode_ordinary_batch / prepare_data.py", f"{share:.2f}", ">= 0.8")


PARTS = {part.__name__: part for part in (train, memory, nll, sample, data)}


@dataclass
class Options:
    what: str = key("all", "which part", choices=("all", *PARTS))
    rounds: int = key(3, "how often each measurement is repeated", low=1)


def main(argv):
    paths, given, options = parse(argv, Options, __doc__)
    config = load_config(paths or ["configs/small.py"], {"batch_size": 4, "dropout": 0.0, **given})
    if config.llm or config.tokenizer.startswith("hf:"):
        raise UserError(
            f"llm = {config.llm}, tokenizer = {config.tokenizer}: only our own models are measured, with bytes or gpt2"
        )
    config = resolve_machine(replace(config, gradient_accumulation_steps=max(1, 128 // config.batch_size)))
    vocab = {"bytes": prepare_data.Bytes, "gpt2": prepare_data.GPT2}[config.tokenizer].vocab_size
    gpu = torch.cuda.get_device_name(config.device) if config.device.startswith("cuda") else ""
    print(
        f"{config.n_layer} layers of {config.n_embd}, vocabulary {vocab:,}, T = {config.block_size}, micro-batches of "
        f"{config.batch_size}, dropout {config.dropout}, {config.dtype}{', compiled for training' * config.compile}; "
        f"torch {torch.__version__}, {gpu or f'{torch.get_num_threads()} CPU threads'}\n"
        "(targets are for configs/small.py on two CPU cores)"
    )
    for name, part in PARTS.items():
        if options.what in ("all", name):
            print(f"\n{part.__doc__}")
            try:
                part(config, vocab, options.rounds)
            except UserError as e:
                if options.what != "all":
                    raise
                line(f"left out: {e}", "-")


if __name__ == "__main__":
    run(main)

"""The paper's comparison: train every method, over seeds and r_max, and put the results beside the paper's.

    python reproduce.py configs/tiny.py                     all methods, three seeds, r_max 0.6, one after another
    python reproduce.py configs/tiny.py --methods=ac_gpt,sigma_temporal --r_max=0.2,0.4,0.6,0.8,1 --seeds=1
    python reproduce.py configs/tiny.py --list              the same as commands, one a line, for a cluster's job array
    python reproduce.py configs/tiny.py --table             from the results that are there; it trains nothing
    python reproduce.py configs/tiny.py --plot              Figures 2, D.1 and D.2 of the paper, as PNG
    python reproduce.py configs/tiny.py --floors            what xz and a 5-gram model make of the same bytes

A finished run leaves one JSON in results/<config>/, with config, seed, commit, evaluation set and token counts. What is finished is
skipped, what was interrupted is resumed: repeat the command. Seeds count from --seed. Keys given on the command line hold for all
runs. This file trains with train.main and scores with evaluate.evaluate; it knows no method.
"""

import itertools
import json
import lzma
import math
import platform
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

import checkpoint
import train
from checkpoint import MACHINE, find_run
from config import UserError, key, load_config, parse, run, whole_file
from evaluate import consistency, evaluate, evaluation_set, first, gain_bits, git_commit, statistics
from prepare_data import read_chunks, read_meta
from report import VARIANTS, difference, name_of, plot, print_table, unfit

# ---------------------------------------------------------------- the runs


@dataclass
class Options:
    methods: str = key("all", f"which, with commas between: {', '.join(VARIANTS)}")
    r_max: str = key("0.6", "which values of r_max, with commas between; --table and --plot show all there are")
    seeds: int = key(3, "how many seeds, from --seed on", low=1)
    split: str = key("val", "whose results --table and --plot show", choices=("val", "test"))
    results: str = key("results", "folder of the results")
    list: bool = key(False, "print the commands of the runs")
    table: bool = key(False, "print the table of the results that are there")
    plot: bool = key(False, "draw the figures")
    floors: bool = key(False, "score xz and a 5-gram model")


def grid(path, given, options):
    """The Config of every run, seed by seed, so that the first seed is complete first."""
    methods = VARIANTS if options.methods == "all" else options.methods.split(",")
    for name in methods:
        if name not in VARIANTS:
            raise UserError(f"--methods: {name!r} is unknown: choose from all, {', '.join(VARIANTS)}")
    try:
        r_max = [float(r) for r in options.r_max.split(",")]
    except ValueError:
        raise UserError(f"--r_max={options.r_max}: give numbers with commas between, like 0.2,0.4") from None
    base = load_config([path], given)
    return [
        load_config([path], given | keys_of(name) | {"r_max": r, "seed": base.seed + i})
        for i, r, name in itertools.product(range(options.seeds), r_max, methods)
    ]


def keys_of(variant):
    """What makes a variant, as keys of Config."""
    method = variant.removesuffix("_query")
    return {"method": method, "sigma_positions": "query" if method != variant else "dual"}


def train_to_the_end(path, config):
    """Train, or go on from the last checkpoint."""
    folder = Path(config.out_dir)
    if there := (folder / "ckpt.pt").exists():
        state = checkpoint.load(folder / "ckpt.pt")
        if other := difference(config, state["config"]):
            raise UserError(f"{folder} holds a run with {other}: move the folder away, or give that value")
    if not there or state["iter"] < config.max_iters:
        keys = [f"--{name}={value}" for name, value in asdict(config).items() if name != "init_from"]
        train.main([path, *keys, *["--resume"] * there])
        if checkpoint.load(folder / "ckpt.pt")["iter"] < config.max_iters:
            raise KeyboardInterrupt


def score(config, given):
    """All that is to be said about a finished run, as it goes into results/: both splits, all modes, consistency."""
    config, state = find_run(config.out_dir, {name: given[name] for name in MACHINE if name in given})
    n, questions = config.mlm_sequences, {split: evaluation_set(config, split) for split in ("val", "test")}
    results = [
        condensed(result, n) for split in questions for result in evaluate(config, state, questions[split], split)
    ]
    steps = [float(row["ms"]) for row in checkpoint.read_log(Path(config.out_dir) / "log.csv") if row["ms"]]
    cpu = (
        f"{torch.get_num_threads()} threads of a CPU ({platform.machine()}, {torch.backends.cpu.get_cpu_capability()})"
    )
    return {
        "run": name_of(config), "commit": git_commit(), "torch": torch.__version__, "machine": torch.cuda.get_device_name() if config.device.startswith("cuda") else cpu,
        "minutes": round(float(np.median(steps)) * state["iter"] / 60_000, 2) if steps else None,  # of training, by its median step
        "checkpoint": Path(state["path"]).name, "iter": state["iter"], "config": asdict(config), "results": results,
        "consistency": consistency(config, state, questions["val"]),
    }  # fmt: skip


def condensed(result, n):
    """A result of evaluate.py without its single sequences; what they say of all, and of the first n."""
    modes = result["modes"]
    numbers = ("perplexity", "stderr", "tokens", "sequences")
    laws = [mode for mode in modes if f"{mode}_no_future" in modes]
    return {
        **{name: result[name] for name in ("split", "reading", "draws", "bound", "evaluation_set")},
        "modes": {mode: {name: modes[mode][name] for name in numbers} for mode in modes},
        "first": {mode: statistics(*first(result, mode, n)) for mode in modes},
        "saved_bits": {law: gain_bits(result, law, len(modes[law]["nll"])) for law in laws},
    }


def reproduce(path, given, options, folder):
    """Train and score what is not finished yet."""
    configs = grid(path, given, options)
    for i, config in enumerate(configs):
        target = folder / f"{name_of(config)}.json"
        if target.exists() and not (wrong := unfit(target, config)):
            continue
        if target.exists():
            raise UserError(f"{target} {wrong}: move it away, or give the same settings")
        print(f"\n{target}, run {i + 1} of {len(configs)}", flush=True)
        train_to_the_end(path, config)
        result = score(config, given)
        with whole_file(target, "w") as file:
            json.dump(result, file, indent=1)


# ---------------------------------------------------------------- floors


def ngram_nll(train, test, order, vocab_size, bos):
    """An n-gram model, Witten-Bell smoothing down to uniform: train (N, T), test (n, T) ids -> NLL (n, T) in nats.

    p_k(x | the k - 1 before it) = (count + kinds * p_{k-1}) / (total + kinds), where kinds is how many different tokens
    followed those in training. Each sequence starts behind BOS, as it does for the networks.
    """
    train, test = (np.pad(x.astype(np.int64), ((0, 0), (order - 1, 0)), constant_values=bos) for x in (train, test))
    p = 1 / vocab_size

    def windows(x, k):
        """The k tokens that end at each place, as one number, the oldest first."""
        return sum(x[:, order - 1 - j : x.shape[1] - j] * vocab_size**j for j in range(k))

    def look_up(wanted, keys, values):
        i = np.searchsorted(keys, wanted).clip(max=len(keys) - 1)
        return np.where(keys[i] == wanted, values[i], 0)

    for k in range(1, order + 1):
        keys, counts = np.unique(windows(train, k), return_counts=True)
        pasts, start, kinds = np.unique(keys // vocab_size, return_index=True, return_counts=True)
        wanted = windows(test, k)
        count, kinds_here = look_up(wanted, keys, counts), look_up(wanted // vocab_size, pasts, kinds)
        total = look_up(wanted // vocab_size, pasts, np.add.reduceat(counts, start))
        p = np.where(total > 0, (count + kinds_here * p) / np.maximum(total + kinds_here, 1), p)
    return -np.log(p)


def write_floors(config, folder):
    """What cheaper models make of the validation text, in bits per byte."""
    if config.tokenizer != "bytes":
        raise UserError(f"--floors: counts and xz are for bytes, not for tokenizer = {config.tokenizer!r}")
    questions, meta = evaluation_set(config, "val"), read_meta(config)
    train, val = (read_chunks(config, split) for split in ("train", "val"))
    five = ngram_nll(train, questions.tokens.numpy(), 5, meta["vocab_size"], meta["separator"])
    texts = [np.asarray(x).astype(np.uint8).tobytes() for x in (train, val)]  # a separator counts as one byte more
    alone, past, both = (
        len(lzma.compress(text, preset=9 | lzma.PRESET_EXTREME)) for text in (texts[1], texts[0], b"".join(texts))
    )
    bits = {
        "5-gram model": five.mean() / math.log(2),
        "xz -9e": 8 * alone / len(texts[1]),
        "xz -9e behind the training text": 8 * (both - past) / len(texts[1]),
    }
    result = {"evaluation_set": questions.hash, "commit": git_commit(), "config": asdict(config), "bits_per_byte": bits}
    with whole_file(folder / "floors.json", "w") as file:
        json.dump(result, file, indent=1)
    print(", ".join(f"{name} {value:.3f}" for name, value in bits.items()), "bits per byte")


# ---------------------------------------------------------------- the command


def main(argv):
    paths, given, options = parse(argv, Options, __doc__)
    if len(paths) != 1 or not paths[0].endswith(".py"):
        raise UserError("name one config file: python reproduce.py configs/tiny.py")
    if bad := {"method", "sigma_positions", "out_dir", "init_from"} & set(given):
        raise UserError(f"--{min(bad)} differs from run to run here: choose runs by --methods, --r_max and --seeds")
    path, config = paths[0], load_config(paths, given)
    folder = Path(options.results) / Path(path).stem
    if options.list:
        keys = "".join(f" --{name}={value}" for name, value in given.items() if name != "seed")
        for c in grid(path, given, options):
            print(
                f"python reproduce.py {path} --methods={c.variant} --r_max={c.r_max:g} --seed={c.seed} --seeds=1{keys}"
            )
        return
    if options.floors:
        return write_floors(config, folder)
    if not (options.table or options.plot):
        reproduce(path, given, options, folder)
    if options.plot:
        plot(path, config, options.split, folder)
    else:
        print_table(path, config, options.split, folder)


if __name__ == "__main__":
    run(main)

"""The paper's comparison: train every method, over seeds and r_max, and put the results beside the paper's.

    python reproduce.py configs/tiny.py                     all methods, three seeds, r_max 0.6, one after another
    python reproduce.py configs/tiny.py --methods=ac_gpt,sigma_temporal --r_max=0.2,0.4,0.6,0.8,1 --seeds=1
    python reproduce.py configs/tiny.py --list              the same as commands, one a line, for a cluster's job array
    python reproduce.py configs/tiny.py --table             from the results that are there; it trains nothing
    python reproduce.py configs/tiny.py --plot              Figures 2, D.1 and D.2 of the paper, as PNG
    python reproduce.py configs/tiny.py --floors            what xz and a 5-gram model make of the same bytes
    python reproduce.py configs/tiny.py --samples=100       samples of the runs of one seed, and how much they restore

A finished run leaves one JSON in results/<config>/, with config, seed, commit, evaluation set and token counts. What is finished is
skipped, what was interrupted is resumed: repeat the command. Seeds count from --seed. Keys given on the command line hold for all
runs. This file trains with train.main and scores with evaluate.evaluate, in one process; it knows no method.
"""

import contextlib
import itertools
import json
import lzma
import math
import os
import shlex
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch

import checkpoint
import generation
import prepare_data
import sample
import train
from checkpoint import MACHINE, find_run, git_commit, open_run
from config import UserError, key, load_config, parse, read_config_file, run, whole_file
from evaluate import consistency, evaluate, evaluation_set, first, statistics
from prepare_data import get_tokenizer, read_chunks, read_meta
from report import FLOORS, SAMPLED, VARIANTS, difference, name_of, plot, print_table, read_result, sample_table

# ---------------------------------------------------------------- the runs


@dataclass
class Options:
    methods: str = key("all", f"which, with commas between: {', '.join(VARIANTS)}")
    r_max: str | None = key(None, "which values of r_max, with commas between; None: the config's")
    seeds: int = key(3, "how many seeds, from --seed on", low=1)
    split: str = key("val", "whose results --table and --plot show", choices=("val", "test"))
    results: str = key("results", "folder of the results")
    list: bool = key(False, "print the commands of the runs")
    table: bool = key(False, "print the tables of all results that are there")
    plot: bool = key(False, "draw the figures of all results that are there")
    floors: bool = key(False, "score xz and a 5-gram model")
    samples: int | None = key(None, "how many samples are drawn, of the runs of the first seed", low=1)


def grid(path, given, options):
    """The Config of every run, seed by seed, so that the first seed is complete first."""
    methods = VARIANTS if options.methods == "all" else options.methods.split(",")
    for name in methods:
        if name not in VARIANTS:
            raise UserError(f"--methods: {name!r} is unknown: choose from all, {', '.join(VARIANTS)}")
    base = load_config([path], given)
    try:
        r_max = [float(r) for r in options.r_max.split(",")] if options.r_max else [base.r_max]
    except ValueError:
        raise UserError(f"--r_max={options.r_max}: give numbers with commas between, like 0.2,0.4") from None
    return [
        load_config([path], given | keys_of(name) | {"r_max": r, "seed": base.seed + i})
        for i, r, name in itertools.product(range(options.seeds), r_max, methods)
    ]


def keys_of(variant):
    """What makes a variant, as keys of Config."""
    method = variant.removesuffix("_query")
    return {"method": method, "sigma_positions": "query" if method != variant else "dual"}


def train_to_the_end(path, config):
    """Train, or go on from the last checkpoint, unless the run is finished."""
    folder = Path(config.out_dir)
    there = (folder / "ckpt.pt").exists()
    if not there and (folder / "best.pt").exists():
        raise UserError(f"{folder} has no ckpt.pt from which to go on: delete the folder")
    state = checkpoint.load(folder / "ckpt.pt") if there else {"iter": 0, "config": asdict(config)}
    if other := difference(config, state["config"]):
        raise UserError(f"{folder} holds a run with {other}: move the folder away, or give that value")
    if state["iter"] < config.max_iters:
        keys = [f"--{name}={value}" for name, value in asdict(config).items() if name != "init_from"]
        if train.main([path, *keys, *["--resume"] * there]).stop:
            raise KeyboardInterrupt


def score(config):
    """All that is to be said about a finished run, as it goes into results/: the splits, all modes, consistency."""
    config, state = find_run(config.out_dir, {name: getattr(config, name) for name in MACHINE})
    splits = [split for split in ("val", "test") if split in read_meta(config)["tokens"]]
    questions = {split: evaluation_set(config, split) for split in splits}
    results = [condensed(x, config.mlm_sequences) for s in splits for x in evaluate(config, state, questions[s], s)]
    steps = [float(row["ms"]) for row in checkpoint.read_log(Path(config.out_dir) / "log.csv") if row["ms"]]
    minutes = round(float(np.median(steps)) * config.max_iters / 60_000, 2) if steps else None  # by the median step
    return {
        "run": name_of(config),
        "trained_by": state.get("commit"),
        "scored_by": git_commit(),
        "torch": torch.__version__,
        "machine": state.get("machine", checkpoint.machine_name(config)),
        "minutes": minutes,
        "checkpoint": Path(state["path"]).name,
        "iter": state["iter"],
        "config": asdict(config),
        "results": results,
        "consistency": consistency(config, state, questions["val"]),
    }


def condensed(result, n):
    """A result of evaluate.py without its single sequences; what they say of all, and of the first n."""
    modes = result["modes"]
    numbers = ("perplexity", "stderr", "tokens", "sequences")
    return {
        **{name: result[name] for name in ("split", "reading", "draws", "bound", "evaluation_set")},
        "modes": {mode: {name: modes[mode][name] for name in numbers} for mode in modes},
        "first": {mode: statistics(*first(result, mode, n)) for mode in modes},
    }


def reproduce(path, given, options, folder):
    """Train and score what is not finished yet."""
    configs = grid(path, given, options)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise UserError(f"cannot write into {folder} ({e.strerror}): choose another folder by --results") from None
    for i, config in enumerate(configs):
        target = folder / f"{name_of(config)}.json"
        if target.exists():
            _, wrong = read_result(target, config)
            if wrong:
                raise UserError(f"{target} {wrong}: move it away, or give the same settings")
            continue
        print(f"\n{target}, run {i + 1} of {len(configs)}", flush=True)
        train_to_the_end(path, config)
        result = score(config)
        with whole_file(target, "w") as file:
            json.dump(result, file, indent=1)


def print_commands(path, given, options):
    """The runs as commands. The data are prepared first, so that the jobs do not all begin with it at once."""
    configs = grid(path, given, options)
    with contextlib.redirect_stdout(sys.stderr):
        prepare_data.prepare_if_missing(configs[0])
    common = [f"--{name}={value}" for name, value in given.items() if name != "seed"] + [f"--results={options.results}"]
    for c in configs:
        own = [f"--methods={c.variant}", f"--r_max={c.r_max}", f"--seed={c.seed}", "--seeds=1"]
        print(shlex.join(["python", "reproduce.py", path, *own, *common]))


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
    prepare_data.prepare_if_missing(config)
    questions, meta = evaluation_set(config, "val"), read_meta(config)
    seen, asked = read_chunks(config, "train"), questions.tokens.numpy()
    one, five = (ngram_nll(seen, asked, order, meta["vocab_size"], meta["separator"]) for order in (1, 5))
    text, past = (np.asarray(x).astype(np.uint8).tobytes() for x in (asked, seen))  # a separator becomes byte 0
    alone, before, both = (len(lzma.compress(x, preset=9 | lzma.PRESET_EXTREME)) for x in (text, past, past + text))
    bits = {
        "frequencies of single bytes": one.mean() / math.log(2),
        "5-gram model": five.mean() / math.log(2),
        "xz -9e of the sequences": 8 * alone / len(text),
        "xz -9e of them behind the training text": 8 * (both - before) / len(text),
    }
    result = {"evaluation_set": questions.hash, "commit": git_commit(), "config": asdict(config), "bits_per_byte": bits}
    with whole_file(folder / FLOORS, "w") as file:
        json.dump(result, file, indent=1)
    print(", ".join(f"{name} {value:.3f}" for name, value in bits.items()), "bits per byte")


# ---------------------------------------------------------------- samples


def sample_runs(path, given, options, folder):
    """Samples of the finished runs of one seed, with temperature 0.8 and greedily, and how much they restore; a JSON a run."""
    for config in grid(path, given, replace(options, seeds=1)):
        target = folder / "samples" / f"{name_of(config)}.json"
        if target.exists():
            continue
        _, wrong = read_result(folder / f"{name_of(config)}.json", config)
        if wrong or not (Path(config.out_dir) / "best.pt").exists():
            print(f"left out: {config.out_dir} is not there or not finished", file=sys.stderr)
            continue
        model, config, state = open_run(config.out_dir, {name: getattr(config, name) for name in MACHINE})
        questions, tokenizer, scores = evaluation_set(config, "val"), get_tokenizer(config.tokenizer), []
        for mode, temperature in itertools.product(SAMPLED, (0.8, 0.0)):
            if sample.has_mode(model, mode, sample.asked_in(mode, questions)):
                how = sample.Options(n=options.samples, mode=mode, temperature=temperature)
                sample.protocol(model, replace(config, batch_size=50), how, tokenizer, state)
                file = sample.samples_file(config, mode, how)
                found = generation.score_samples(config, state, file)
                scores.append({"mode": mode, "temperature": temperature, **found})
        about = {"run": name_of(config), "sampled_by": git_commit(), "evaluation_set": questions.hash}
        with whole_file(target, "w") as file:
            json.dump({**about, "config": asdict(config), "scores": scores}, file, indent=1)


# ---------------------------------------------------------------- the command


def main(argv):
    paths, given, options = parse(argv, Options, __doc__)
    if len(paths) != 1 or not paths[0].endswith(".py"):
        raise UserError("name one config file: python reproduce.py configs/tiny.py")
    path, config = paths[0], load_config(paths, given)
    fixed = {"method", "sigma_positions", "out_dir", "init_from"} & {*given} | {"out_dir"} & {*read_config_file(path)}
    if fixed:
        fix = "leave it out, and choose runs by --methods, --r_max and --seeds"
        raise UserError(f"--{min(fixed)} differs from run to run here: {fix}")
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise UserError("reproduce.py runs in one process: give the jobs of --list to your GPUs, not torchrun")
    folder = Path(options.results) / Path(path).stem
    if options.list:
        return print_commands(path, given, options)
    if options.floors:
        return write_floors(config, folder)
    if options.samples:
        sample_runs(path, given, options, folder)
        return print(sample_table(folder / "samples", config, options.samples))
    if not (options.table or options.plot):
        reproduce(path, given, options, folder)
    if options.table or not options.plot:
        print_table(path, config, options.split, folder, {c.r_max for c in grid(path, given, options)})
    if options.plot:
        plot(path, config, options.split, folder)


if __name__ == "__main__":
    run(main)

"""What coral.py does when it is called: train in stages, compare ways to decode, show a draft being refined.

The method itself is in coral.py, the loop of training in train.py.
"""

import itertools
import json
import math
import os
import statistics
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from tqdm import tqdm

import coral
import train
from checkpoint import MACHINE, build, find_run, git_commit, load, machine_name, restore, start_from
from config import UserError, key, load_config, parse, read_config_file, task_of, whole_file
from coral import STAGES, Decoder, corrupt, decode, pairs_of
from evaluate import batches, evaluation_set
from prepare_data import encode, get_tokenizer, read_chunks

RATES = {"0": 1, "1": 5, "2a": 1, "2b": 1}  # of the config's learning rate (COrAL paper, Appendix D: 5 : 1 : 1)
PAPER = {  # GSM8K, Table 1 and Section 4.3
    "next token, before COrAL": "77.0%",
    "next token": "74.1% at 39.7/s",
    "COrAL": "75.3% at 43.4/s",
    "without verifier": "72.4% at 156.8/s",
    "without multi-forward": "78.7% at 14.9/s",
}


ASKED = ("n", "split", "block")  # options that change what --evaluate finds


@dataclass
class Options:
    evaluate: bool = key(False, "answers of a task, right or wrong, by each way to decode; a JSON in --results")
    offsets: bool = key(False, "loss and accuracy of each offset; a JSON in --results")
    table: bool = key(False, "print what --evaluate found for all seeds in --results")
    plot: bool = key(False, "of all configs that are named: a figure of it, and of --offsets")
    text: str | None = key(None, "a text to be continued, or of a task a prompt; shown while it is refined")
    n: int = key(300, "--evaluate: how many questions", low=1)
    split: str = key("test", "--evaluate: whose questions", choices=("val", "test"))
    iterations: int = key(
        4, "--text, without verifier: N, how many more iterations a token has to stay as it is", low=0
    )
    block: int = key(64, "b, positions that are refined at a time", low=1)
    verifier: bool = key(False, "--text: choose among candidates, accept by vote")
    max_new_tokens: int | None = key(None, "--text: how many tokens follow; None: up to 120", low=1)
    skip_2a: bool = key(False, "train stage 2b behind stage 1")
    control: bool = key(False, "train the next token alone, too, for as many steps as all stages together have")
    results: str = key("results", "folder for what is found")
    overwrite: bool = key(False, "train anew")


# ---------------------------------------------------------------- training


def train_stage(path, keys, before, behind=False):
    """One run that starts from another, or go on with it -> is it finished? behind: are there stages that began from it?"""
    folder, done, steps = Path(keys["out_dir"]), 0, load_config([path], keys).max_iters
    how = ["--overwrite", f"--init_from={before}"]  # there may be a best.pt, where a kill left no ckpt.pt
    if (folder / "ckpt.pt").exists():
        _, state = find_run(path, keys, "ckpt.pt", to_resume=True)
        if (begun := state["config"]["init_from"]) != before:
            raise UserError(f"{folder} started from {begun}, not {before}: --overwrite, or give another --out_dir")
        done, how = state["iter"], ["--resume"]
        if done < steps and behind:
            fix = "--overwrite, or give another --out_dir"
            raise UserError(f"{folder} would go on, though the stages behind it began from what it is now: {fix}")
    if done >= steps:
        print(f"{folder} is finished")
        return True
    return not train.main([path, *(f"--{name}={value}" for name, value in keys.items()), *how]).stop


def train_stages(path, given, options):
    """Stage after stage, each a run of its own in <out_dir>/<stage>, which starts from the one before."""
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise UserError(
            "the stages run one after another in one process; for several, torchrun train.py with --stage, --init_from"
        )
    if "stage" in given:
        raise UserError(f"stage = {given['stage']!r}: coral.py trains them all; for one alone, train.py --stage=...")
    base = load_config([path], given)
    before, given = base.init_from, {name: value for name, value in given.items() if name != "init_from"}
    stages = [stage for stage in STAGES if not (stage == "2a" and options.skip_2a)]
    folders = [Path(base.out_dir) / stage for stage in stages]
    if options.overwrite:
        for file in (file for name in (*STAGES, "control") for file in (Path(base.out_dir) / name).glob("*.pt")):
            file.unlink()
    for i, (stage, folder) in enumerate(zip(stages, folders)):
        rate = base.learning_rate * RATES[stage]
        keys = {**given, "stage": stage, "out_dir": str(folder), "learning_rate": rate}
        behind = any((later / "ckpt.pt").exists() for later in folders[i + 1 :])
        if not train_stage(path, keys, before, behind):
            return
        before = str(folder)
    if options.control:
        keys = {**given, "stage": "0", "out_dir": f"{base.out_dir}/control", "max_iters": len(stages) * base.max_iters}
        train_stage(path, keys, base.init_from)


# ---------------------------------------------------------------- runs


def open_for_decoding(path, given, stage=None):
    """A stage, by default the last, of a config file or a folder -> (Coral, its config, state). A GPT becomes a Coral of stage 0."""
    if "stage" in given:
        raise UserError(f"stage = {given['stage']!r} is for training: leave it out, or name the folder of that stage")
    base = Path(load_config([path], given).out_dir if path.endswith(".py") else path)
    there = [base / name for name in reversed(STAGES) if (base / name / "best.pt").exists()]
    folder = str(base / stage if stage else there[0] if there else base)
    config, state = find_run(path if path.endswith(".py") else folder, {**given, "out_dir": folder})
    if config.method == "coral":
        if config.k_f > state["config"]["k_f"]:
            trained = f"{folder} is trained to predict {state['config']['k_f']} tokens ahead, and knows nothing beyond"
            raise UserError(f"k_f = {config.k_f}: {trained}: lower it")
        return restore(config, state), config, state
    if config.llm or config.method not in ("gpt", "ac_gpt"):
        raise UserError(f"{folder} has method = {config.method!r}, llm = {config.llm}: name a run of coral, or of gpt")
    begun = replace(
        config, method="coral", stage="0", law="prompt", r_min=0.0, r_max=0.0, compile=False, init_from=folder
    )
    model = build(begun, state["vocab_size"], state["separator"])
    start_from(model, begun)
    return model.eval(), config, state


def decoder_of(model, config, **how):
    """A Decoder for a run. A model of the next token predicts that one only, and has nothing to refine."""
    if model.stage == "0":
        how |= {"k_f": 1, "backward": False, "verifier": False, "N": 0}
    how = {"k_f": config.k_f, "k_b": config.k_b, "max_len": config.block_size + 1, **how}
    return Decoder(model.log_p, model.bos, generator=torch.Generator().manual_seed(config.eval_seed), **how)


# ---------------------------------------------------------------- answers, right or wrong


def ways():
    """Name, stage, and settings of each way to decode."""
    plain = {"k_f": 1, "backward": False, "N": 0}
    yield "next token, trained as long as all stages", "control", plain
    yield "next token, before COrAL", "0", plain
    yield "next token", "2b", plain
    yield "COrAL", "2b", {"verifier": True}
    for backward in (True, False):
        for N in (0, 1, 2, 4, 8):
            yield (
                f"without verifier{'' if backward else ', no backward'}, N = {N}",
                "2b",
                {"N": N, "backward": backward},
            )
    yield "without multi-forward", "2b", {"verifier": True, "k_f": 1}


def answer(decoder, rows, P):
    """Decode behind the first P tokens of each row (n, L) of whole answers -> how many were right, and what it took."""
    right = tokens = unfinished = 0
    start = time.perf_counter()
    for row in tqdm(rows.tolist(), "answers", leave=False, disable=None):
        y = decode(decoder, row[:P])
        right += y == row
        tokens += len(y) - P
        unfinished += decoder.eos not in y[P:]
    return {"right": right, "n": len(rows), "tokens": tokens, "unfinished": unfinished, "calls": decoder.calls,
            "seconds": time.perf_counter() - start}  # fmt: skip


def evaluate(path, given, options):
    """Answer n questions of a task in every way, and write down what came out."""
    base = Path(load_config([path], given).out_dir)
    names = [name for name in ("control", "0", "2b") if name != "control" or (base / name / "best.pt").exists()]
    models = {name: open_for_decoding(path, given, name) for name in names}
    model, config, state = models["2b"]
    for _, run, _ in models.values():
        if load(Path(run.out_dir) / "ckpt.pt")["iter"] < run.max_iters:
            raise UserError(f"{run.out_dir} is not finished: python coral.py {path} goes on with it")
    rows = torch.from_numpy(read_chunks(config, options.split)[: options.n].astype("int64"))
    if (rows[:, -1] != model.bos).any() or (rows == model.bos).sum() > len(rows) or not config.prompt_length:
        what = "--evaluate is for documents of block_size - 1 tokens behind prompts of prompt_length"
        raise UserError(f"{path} asks no questions: {what}, like configs/coral_product.py")
    found = []
    for name, stage, how in (way for way in ways() if way[1] in models):
        model, run, _ = models[stage]
        decoder = decoder_of(model, run, block=options.block, **how)
        found.append({"way": name, **how, **answer(decoder, model.slots(rows), 1 + run.prompt_length)})
        one = found[-1]
        print(f"{name:42}{one['right'] / one['n']:8.1%}{one['tokens'] / one['calls']:8.2f} tokens a call", flush=True)

    about = {name: getattr(options, name) for name in ASKED}
    write(path, given, options, "s", config, state, {**about, "ways": found})


def name_of(kind, seed, given, options):
    """The name of a result: all that was asked for on the command line is in it."""
    asked = {name: value for name, value in given.items() if name not in (*MACHINE, "seed", "out_dir", "data_dir")}
    asked |= {name: getattr(options, name) for name in ASKED if getattr(options, name) != getattr(Options, name)}
    return f"{kind}{seed}" + "".join(f"_{name}{value}" for name, value in asked.items()) + ".json"


def write(path, given, options, kind, config, state, found):
    """A JSON in results/<config>/."""
    made = {
        "trained_by": state.get("commit"),
        "scored_by": git_commit(),
        "machine": machine_name(config),
        "iter": state["iter"],
    }
    with whole_file(Path(options.results) / Path(path).stem / name_of(kind, config.seed, given, options), "w") as file:
        json.dump({"config": asdict(config), **made, **found}, file, indent=1)


def read_ways(path, given, options):
    """What --evaluate found for all seeds: their JSONs, and {way: [(right in %, tokens a call, tokens a second) of each seed]}."""
    folder = Path(options.results) / Path(path).stem
    rest = name_of("", "", given, options)
    files = [file for file in sorted(folder.glob("s*.json")) if file.name[1:].removesuffix(rest).isdigit()]
    if not files:
        raise UserError(f"{folder} has no results of these settings (s*{rest}): python coral.py {path} --evaluate")
    runs, rows = [json.loads(file.read_text()) for file in files], {}
    for file, run in zip(files, runs):
        apart = [name for name in run["config"] if run["config"][name] != runs[0]["config"].get(name)]
        if apart := set(apart) - {"seed", "out_dir", "init_from", "data_dir", *MACHINE}:
            raise UserError(f"{file} has another {min(apart)} than {files[0]}: move it away")
        for way in run["ways"]:
            figures = (100 * way["right"] / way["n"], way["tokens"] / way["calls"], way["tokens"] / way["seconds"])
            rows.setdefault(way["way"], []).append(figures)
    return runs, rows


def table(path, given, options):
    """The ways to decode, mean and standard deviation over seeds, with the paper's figures beside."""
    runs, rows = read_ways(path, given, options)

    def cell(values, digits):
        spread = f" +- {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
        return f"{statistics.mean(values):.{digits}f}{spread}"

    lines = [f"{'':42}{'right, %':>16}{'tokens a call':>18}{'tokens/s':>16}   GSM8K in the paper"]
    paper = dict(PAPER)
    for name, found in rows.items():
        right, calls, speed = zip(*found)
        theirs = paper.pop(name.partition(", N")[0], "")  # it does not say for which N
        lines.append(f"{name:42}{cell(right, 1):>16}{cell(calls, 2):>18}{cell(speed, 0):>16}   {theirs}".rstrip())
    seeds = ", ".join(str(run["config"]["seed"]) for run in runs)
    about = f"{Path(path).stem}, {runs[0]['split']}: {runs[0]['ways'][0]['n']} questions, seed{'s' * (len(runs) > 1)} {seeds}"
    return "\n".join([about, *sorted({run["machine"] for run in runs}), "", *lines])


# ---------------------------------------------------------------- offsets


@torch.no_grad()
def offset_losses(model, config, questions, offsets):
    """{offset: (loss in nats, share of right first guesses, pairs)}: ahead on clean text, behind in corrupt patches. (The paper's Figure 8
    counts a token as right among the eight likeliest.)
    """
    found = {}
    for d in offsets:
        nll = right = n = 0
        for i, (x, c) in enumerate(batches(config, questions.tokens, questions.cond[config.law])):
            clean, response = model.slots(x), F.pad(~c, (1, 0))
            corrupted, where = corrupt(clean, response, generator=torch.Generator().manual_seed(i), **model.noise)
            src, tgt, real = pairs_of(response if d > 0 else where, [d])
            hidden = model.pairs(clean if d > 0 else corrupted, src, tgt)[model.moved(real)]
            logits, labels = model.body.head(hidden).cpu().double(), clean.gather(1, tgt)[real]
            nll += F.cross_entropy(logits, labels, reduction="sum").item()
            right, n = right + (logits.argmax(-1) == labels).sum().item(), n + len(labels)
        if n:  # none may be so far apart
            found[d] = (nll / n, right / n, n)
    return found


def print_offsets(path, given, options):
    model, config, state = open_for_decoding(path, given)
    if model.stage == "0":
        raise UserError(f"{config.out_dir} knows the next token only: train the later stages first")
    k_f, k_b = (state["config"][name] for name in ("k_f", "k_b"))
    found = offset_losses(model, config, evaluation_set(config, "val"), range(-k_b - 4, k_f + 3))
    print(f"{state['path']}, step {state['iter']}\noffset   bits   right   (beyond what is trained: in brackets)")
    for d, (loss, right, _) in found.items():
        print(f"{f'{d:+d} ' if -k_b <= d <= k_f else f'({d:+d})':>6}{loss / math.log(2):8.3f}{right:8.1%}")
    found = {d: dict(zip(("loss", "right", "pairs"), values)) for d, values in found.items()}
    write(path, given, options, "offsets_s", config, state, {"offsets": found})


def plot(paths, given, options):
    """results/coral.png: of each config right answers and tokens a call against N, and the accuracy of each offset, where they are there."""
    try:
        import matplotlib
    except ImportError:
        raise UserError("--plot needs matplotlib: pip install matplotlib") from None
    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, 3, figsize=(16, 4.2))
    for path in paths:
        name = Path(path).stem.removeprefix("coral_")
        for file in sorted((Path(options.results) / Path(path).stem).glob("offsets_s*.json")):
            found = json.loads(file.read_text())
            x, y = zip(*((int(d), 100 * one["right"]) for d, one in found["offsets"].items()))
            panels[2].plot(x, y, "o-", label=f"{name}, seed {found['config']['seed']}")
        if not [*(Path(options.results) / Path(path).stem).glob("s*.json")]:
            continue
        _, rows = read_ways(path, given, options)
        for kind, style in (("without verifier", "o-"), ("without verifier, no backward", "s:")):
            found = [
                (int(N), *zip(*rows[way])) for way in rows for head, _, N in [way.partition(", N = ")] if head == kind
            ]
            N, *values = zip(*found)
            for panel, value in zip(panels, values):
                mean = [statistics.mean(x) for x in value]
                spread = [statistics.stdev(x) if len(x) > 1 else 0.0 for x in value]
                panel.errorbar(N, mean, spread, fmt=style, capsize=3, label=f"{name}, {kind}")
        for way, style in (("next token", "--"), ("next token, trained as long as all stages", "-.")):
            if way in rows:
                panels[0].axhline(
                    statistics.mean(x[0] for x in rows[way]), linestyle=style, color="grey", label=f"{name}, {way}"
                )
    for panel, y in zip(panels, ("right answers, %", "tokens a call", "right first guesses, %")):
        panel.set(ylabel=y, xlabel="N, iterations that a token has to stay")
        panel.grid(alpha=0.3)
        panel.legend(fontsize=7)
    panels[2].set(xlabel="offset d of the target from the source")
    with whole_file(Path(options.results) / "coral.png") as file:
        figure.savefig(file, format="png", dpi=100, bbox_inches="tight")
    print(file.name)


# ---------------------------------------------------------------- watching it


def show_refinement(path, given, options):
    """Print a line for each iteration: what is fixed by now | the draft, tokens that changed in [ ]."""
    model, config, state = open_for_decoding(path, given)
    tokenizer = get_tokenizer(config.tokenizer)
    prompt = [model.bos, *encode(tokenizer, options.text)]
    if len(prompt) < 2:
        raise UserError("--text is empty: give it at least one token")
    if len(prompt) > config.block_size:
        raise UserError(f"--text has {len(prompt) - 1} tokens, block_size = {config.block_size}: shorten it")
    if model.stage == "0":
        print(
            f"note: {config.out_dir} is a model of the next token: one token a call, nothing to refine", file=sys.stderr
        )
    max_len = min(config.block_size + 1, len(prompt) + (options.max_new_tokens or 120))
    how = {"N": options.iterations, "block": options.block, "verifier": options.verifier, "max_len": max_len}
    decoder, before, P = decoder_of(model, config, **how), list(prompt), len(prompt)

    def text(ids):
        return tokenizer.decode(ids).replace("\n", "\\n")

    def watch(y, s):
        nonlocal before
        changed = [t < len(before) and before[t] != x for t, x in enumerate(y)]

        def part(a, b):
            runs = ((marked, [*run]) for marked, run in itertools.groupby(range(a, b), lambda t: changed[t]))
            return "".join(text([y[t] for t in run]).join("[]" if marked else ("", "")) for marked, run in runs)

        start = max(P, s - 40)
        print(f"{decoder.calls:4}  {'..' * (start > P)}{part(start, s)}|{part(s, len(y))}", flush=True)
        before = list(y)

    y = decode(decoder, prompt, watch)
    ended = "" if decoder.eos in y[P:] else ", without an end"
    print(f"{text(y[1:])}\n({len(y) - P} tokens in {decoder.calls} calls{ended}; {state['path']})")


TASK = ("n", "split", "block", "results")
TAKES = {
    "text": ("iterations", "block", "verifier", "max_new_tokens"),
    "offsets": ("results",),
    "evaluate": TASK,
    "table": TASK,
    "plot": ("results",),
    None: ("skip_2a", "control", "overwrite"),
}


def main(argv):
    paths, given, options = parse(argv, Options, coral.__doc__)
    task = task_of(options, TAKES)
    if task == "plot" and paths:
        return plot(paths, given, options)
    if len(paths) != 1:
        raise UserError("name one config file, or to decode a run folder: python coral.py configs/coral_product.py")
    path = paths[0]
    if task == "text":
        return show_refinement(path, given, options)
    if not path.endswith(".py"):
        raise UserError(f"{path}: only --text takes a folder; give a config file, like configs/coral_product.py")
    if task == "offsets":
        return print_offsets(path, given, options)
    if task == "evaluate":
        evaluate(path, given, options)
    if task in ("evaluate", "table"):
        return print(table(path, given, options))
    if read_config_file(path).get("method") != "coral":
        raise UserError(f"{path} has no method = 'coral': give a config like configs/coral_product.py")
    train_stages(path, given, options)

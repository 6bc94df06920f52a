"""What coral.py does when it is called: train in stages, compare ways to decode, show a draft being refined.

The method itself is in coral.py, the loop of training in train.py.
"""

import itertools
import json
import math
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from tqdm import tqdm

import coral
import train
from checkpoint import find_run, git_commit, machine_name, restore
from config import UserError, key, load_config, parse, read_config_file, whole_file
from coral import STAGES, Coral, Decoder, TargetAware, corrupt, decode, pairs_of
from evaluate import batches, evaluation_set
from prepare_data import encode, get_tokenizer, prepare_if_missing, read_chunks, read_meta

RATES = {
    "0": 1,
    "1": 5,
    "2a": 1,
    "2b": 1,
}  # learning rates, relative to the config's (CORAL paper, Appendix D: 5 : 1 : 1)
PAPER = {  # GSM8K, Table 1 and Section 4.3: accuracy in percent, tokens per second
    "next token, before COrAL": (77.0, None),
    "next token": (74.1, 39.7),
    "COrAL": (75.3, 43.4),
    "without verifier": (72.4, 156.8),
    "without multi-forward": (78.7, 14.9),
}


@dataclass
class Options:
    evaluate: bool = key(False, "answers of the test set, right or wrong, by each way to decode; a JSON in --results")
    offsets: bool = key(False, "loss and accuracy of each offset")
    table: bool = key(False, "print what --evaluate found for all seeds in --results")
    text: str | None = key(None, "a text to be continued, or of a task a prompt; shown while it is refined")
    n: int = key(300, "--evaluate: how many questions", low=1)
    iterations: int = key(
        4, "--text, without verifier: N, how many more iterations a token has to stay as it is", low=0
    )
    block: int = key(64, "b, positions that are refined at a time", low=1)
    verifier: bool = key(False, "--text: choose among candidates, accept by vote")
    max_new_tokens: int | None = key(None, "--text: how many tokens follow; None: up to 120", low=1)
    skip_2a: bool = key(False, "train stage 2b behind stage 1")
    results: str = key("results", "folder for what is found")
    overwrite: bool = key(False, "train anew")


# ---------------------------------------------------------------- training


def train_stages(path, given, options):
    """Stage after stage, each a run of its own in <out_dir>/<stage>, which starts from the one before."""
    base, before = load_config([path], given), None
    rest = {name: value for name, value in given.items() if name not in ("out_dir", "stage", "learning_rate")}
    keys = [f"--{name}={value}" for name, value in rest.items()]
    for stage in STAGES:
        if stage == "2a" and options.skip_2a:
            continue
        folder = Path(base.out_dir) / stage
        state = folder / "ckpt.pt"
        if state.exists() and not options.overwrite and find_run(folder, {}, "ckpt.pt")[1]["iter"] >= base.max_iters:
            print(f"{folder} is finished")
        else:
            own = [f"--stage={stage}", f"--out_dir={folder}", f"--learning_rate={base.learning_rate * RATES[stage]}"]
            there = state.exists() and not options.overwrite
            how = ["--resume"] * there + ["--overwrite"] * options.overwrite
            how += [f"--init_from={before}"] if before and not there else []
            if train.main([path, *keys, *own, *how]).stop:
                return
        before = folder


# ---------------------------------------------------------------- runs


def open_for_decoding(place, given, stage="2b"):
    """A config file or a folder -> (Coral, its config, state). Of COrAL its last stage; a GPT becomes a Coral of stage 0."""
    folder = Path(load_config([place], given).out_dir) if place.endswith(".py") else Path(place)
    folder = folder / stage if (folder / stage).is_dir() else folder
    config, state = find_run(str(folder), {name: value for name, value in given.items() if name != "out_dir"})
    trained = state["config"].get("k_f", config.k_f)
    if config.k_f > trained:
        raise UserError(
            f"k_f = {config.k_f}: {folder} is trained to predict {trained} tokens ahead, and further it knows nothing: lower it"
        )
    model = restore(config, state)
    if isinstance(model, Coral):
        return model, config, state
    if config.llm or config.method not in ("gpt", "ac_gpt"):
        raise UserError(f"{folder} was trained by method = {config.method!r}: name a run of coral, or of gpt")
    body = TargetAware(model.body.vocab_size, config.n_layer, config.n_head, config.n_embd)
    body.load_state_dict({**model.body.state_dict(), "lm_head": model.body.wte.weight})
    return Coral(body.to(config.device).eval(), model.bos, stage="0"), config, state


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


def evaluate(path, given, options, split="test"):
    """Answer n questions of a task in every way; write results/<config>/s<seed>.json."""
    config = load_config([path], given)
    prepare_if_missing(config)
    rows = torch.from_numpy(read_chunks(config, split)[: options.n].astype("int64"))
    end = read_meta(config)["separator"]
    if not (config.prompt_length and (rows[:, -1] == end).all() and (rows == end).sum() == len(rows)):
        raise UserError(
            f"{path} asks no questions: --evaluate is for documents of block_size - 1 tokens, like configs/coral_carry.py"
        )
    found, models = [], {}
    for name, stage, how in ways():
        if stage not in models:
            models[stage] = open_for_decoding(path, given, stage)
        model, run, state = models[stage]
        decoder = decoder_of(model, run, block=options.block, **how)
        found.append({"way": name, **how, **answer(decoder, model.slots(rows), 1 + run.prompt_length)})
        one = found[-1]
        print(f"{name:42}{one['right'] / one['n']:8.1%}{one['tokens'] / one['calls']:8.2f} tokens a call", flush=True)
    result = {"config": asdict(run), "trained_by": state.get("commit"), "scored_by": git_commit(), "split": split,
              "machine": machine_name(run), "block": options.block, "ways": found}  # fmt: skip
    folder = Path(options.results) / Path(path).stem
    with whole_file(folder / f"s{config.seed}.json", "w") as file:
        json.dump(result, file, indent=1)


def table(path, options):
    """The ways to decode, mean and standard deviation over seeds, with the paper's figures beside."""
    folder = Path(options.results) / Path(path).stem
    runs = [json.loads(file.read_text()) for file in sorted(folder.glob("s*.json"))]
    if not runs:
        raise UserError(f"{folder} has no results: python coral.py {path} --evaluate")
    rows = {}
    for run in runs:
        for way in run["ways"]:
            figures = (100 * way["right"] / way["n"], way["tokens"] / way["calls"], way["tokens"] / way["seconds"])
            rows.setdefault(way["way"], []).append(figures)

    def cell(values, digits):
        spread = f" +- {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
        return f"{statistics.mean(values):.{digits}f}{spread}"

    lines = [f"{'':42}{'right, %':>16}{'tokens a call':>18}{'tokens/s':>16}   GSM8K in the paper"]
    for name, found in rows.items():
        right, calls, speed = zip(*found)
        theirs = PAPER.get(name.partition(", N")[0])
        paper = "" if theirs is None else f"{theirs[0]}%" + (f" at {theirs[1]}/s" if theirs[1] else "")
        lines.append(f"{name:42}{cell(right, 1):>16}{cell(calls, 2):>18}{cell(speed, 0):>16}   {paper}")
    way = runs[0]["ways"][0]
    about = f"{Path(path).stem}, {runs[0]['split']}: {way['n']} questions, seeds {[r['config']['seed'] for r in runs]}"
    return "\n".join([about, "", *lines])


# ---------------------------------------------------------------- offsets


@torch.no_grad()
def offset_losses(model, config, questions, offsets):
    """{offset: (loss in nats, share of right first guesses, pairs)}: ahead on clean text, behind in spoilt patches."""
    cond = questions.cond[config.law]
    found = {}
    for d in offsets:
        nll = right = n = 0
        for i, (x, c) in enumerate(batches(config, questions.tokens, cond)):
            clean, response = model.slots(x), torch.nn.functional.pad(~c, (1, 0))
            spoilt, where = corrupt(clean, response, generator=torch.Generator().manual_seed(i), **model.noise)
            src, tgt, real = pairs_of(response if d > 0 else where, [d])
            logits = model.body.head(model.pairs(clean if d > 0 else spoilt, src, tgt)[model.moved(real)]).double()
            labels = model.moved(clean.gather(1, tgt)[real])
            nll += torch.nn.functional.cross_entropy(logits, labels, reduction="sum").item()
            right, n = right + (logits.argmax(-1) == labels).sum().item(), n + len(labels)
        found[d] = (nll / n, right / n, n)
    return found


def print_offsets(path, given, options):
    model, config, state = open_for_decoding(path, given)
    if model.stage == "0":
        raise UserError(f"{config.out_dir} knows the next token only: train the later stages first")
    found = offset_losses(model, config, evaluation_set(config, "val"), range(-config.k_b - 4, config.k_f + 3))
    print("offset   bits   right   (beyond what is trained: in brackets)")
    for d, (loss, right, _) in found.items():
        outside = not -config.k_b <= d <= config.k_f
        print(f"{f'({d:+d})' if outside else f'{d:+d} ':>6}{loss / math.log(2):8.3f}{right:8.1%}")
    result = {"config": asdict(config), "trained_by": state.get("commit"), "scored_by": git_commit(),
              "offsets": {d: dict(zip(("loss", "right", "pairs"), values)) for d, values in found.items()}}  # fmt: skip
    with whole_file(Path(options.results) / Path(path).stem / f"offsets_s{config.seed}.json", "w") as file:
        json.dump(result, file, indent=1)


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
        return tokenizer.decode(ids).replace("\n", "\\n").replace("<|endoftext|>", "#")

    def watch(y, s):
        nonlocal before
        changed = [before[t : t + 1] not in ([], y[t : t + 1]) for t in range(len(y))]

        def part(a, b):
            runs = itertools.groupby(range(a, b), lambda t: changed[t])
            texts = ((text([y[t] for t in run]), marked) for marked, run in runs)
            return "".join(f"[{x}]" if marked else x for x, marked in texts)

        start = max(P, s - 40)
        print(f"{decoder.calls:4}  {'..' * (start > P)}{part(start, s)}|{part(s, len(y))}", flush=True)
        before = list(y)

    y = decode(decoder, prompt, watch)
    ended = "" if decoder.eos in y[P:] else ", without an end"
    print(f"{text(y[1:])}\n({len(y) - P} tokens in {decoder.calls} calls{ended}; {state['path']})")


def main(argv):
    paths, given, options = parse(argv, Options, coral.__doc__)
    if len(paths) != 1:
        raise UserError("name one config file, or to decode a run folder: python coral.py configs/coral_carry.py")
    path = paths[0]
    if options.text is not None:
        return show_refinement(path, given, options)
    if options.offsets:
        return print_offsets(path, given, options)
    if options.evaluate or options.table:
        if options.evaluate:
            evaluate(path, given, options)
        return print(table(path, options))
    if not path.endswith(".py") or read_config_file(path).get("method") != "coral":
        raise UserError(f"{path} is no config file with method = 'coral': give one like configs/coral_carry.py")
    train_stages(path, given, options)

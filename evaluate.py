"""Perplexity in the five modes of the paper, on questions that are the same for every model.

    python evaluate.py configs/tiny.py                      the table, also as eval_val_r0.6.json in the run's folder
    python evaluate.py out/A out/B --r_max=0.6              several runs side by side
    python evaluate.py configs/tiny.py --split=test
    python evaluate.py configs/tiny.py --consistency        how far its conditionals are from those of one joint
    python evaluate.py configs/tiny.py --samples            what sample.py --protocol drew; --mauve: see generation.py
    python evaluate.py configs/tiny.py --text "The state of the [[Union]] is strong"

The last one prints log p([[..]] | all the rest). A space in front of [[ belongs to the marked part if the tokenizer
joins spaces to the words after them (GPT-2's), else it is known.
Perplexity = exp(total NLL / number of tokens), over all scored tokens of all sequences (paper, Section 4.1). This file
draws no samples and trains nothing.
"""

import hashlib
import itertools
import json
import math
import os
import re
import zipfile
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

import conditioning
from checkpoint import METHODS, autocast, find_run, git_commit, open_run, restore
from conditioning import LAWS, EvaluationSet, draw_evaluation_set, modes_with, uniform_int
from config import UserError, key, parse, run, task_of, whole_file
from prepare_data import encode, file_sha256, get_tokenizer, read_chunks, read_meta

# ---------------------------------------------------------------- the questions


def evaluation_set(config, split):
    """The questions of a data set, drawn once and kept beside it as eval_<split>_<hash of what was asked>.npz."""
    if config.law not in LAWS:
        raise UserError(f"law = {config.law!r} is unknown: choose from {', '.join(LAWS)}")
    chunks = read_chunks(config, split)
    names = ("block_size", "eval_sequences", "eval_seed", "r_min", "r_max", "b_min", "b_max", "law", "prompt_length")
    code = file_sha256(conditioning.__file__)  # a changed law asks other questions
    asked = json.dumps([read_meta(config)["sha256"][split], code, *(getattr(config, name) for name in names)])
    path = config.data_folder / f"eval_{split}_{hashlib.sha256(asked.encode()).hexdigest()[:12]}.npz"
    if path.exists():
        try:
            with np.load(path) as file:
                saved = {name: torch.from_numpy(file[name]) for name in file.files}
            return EvaluationSet(saved.pop("tokens"), saved)
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as e:
            raise UserError(f"{path} cannot be read ({type(e).__name__}): delete it, it will be drawn again") from None
    questions = draw_evaluation_set(chunks, config)
    if os.access(config.data_folder, os.W_OK):  # a shared read-only data folder: drawn anew each time, the same
        with whole_file(path) as file:
            np.savez(file, tokens=questions.tokens, **questions.cond)
    return questions


# ---------------------------------------------------------------- the scores


def batches(config, *tensors):
    """Tensors with one first axis -> list of tuples of their parts of batch_size."""
    return list(zip(*(tensor.split(config.batch_size) for tensor in tensors)))


@torch.no_grad()
def nll_of(model, config, tokens, cond, desc, generator=None, scored=None):
    """The NLL of all questions, batch by batch: (n, T) on the CPU, 0 outside `scored`. By default model.score: of all x_e."""
    parts, questions = [], batches(config, tokens, cond, ~cond if scored is None else scored)
    for x, c, s in tqdm(questions, desc, leave=False, disable=None):  # None: no bar where nobody watches
        with autocast(config):
            nll = model.score(x, c, generator) if scored is None else model.exact_nll(x, c, s, generator)
            parts.append(nll.cpu().double())
    return torch.cat(parts)


def seeded(config, draws):
    """The generators of `draws` random readings; of the one reading that draws nothing, None."""
    return [torch.Generator().manual_seed(config.eval_seed + 1 + i) for i in range(draws)] or [None]


def mean_and_error(sums, counts):
    """Of n sequences, (n,) each -> mean per token, and its standard error with sequences as the independent units."""
    n, mean = len(sums), (sums.sum() / counts.sum()).item()
    spread = (sums - mean * counts).square().sum().sqrt().item()  # the ratio estimator's
    return mean, spread * math.sqrt(n / (n - 1)) / counts.sum().item() if n > 1 else math.nan


def statistics(sums, counts):
    """The NLL of n sequences in nats and their scored tokens, (n,) each -> perplexity, its standard error, and over what."""
    mean, error = mean_and_error(sums, counts)
    perplexity, tokens = math.exp(mean) if mean < 700 else math.inf, int(counts.sum())
    return {"perplexity": perplexity, "stderr": perplexity * error, "tokens": tokens, "sequences": len(sums)}


def five_modes(model, config, questions, draws):
    """{mode: (sums of NLL, numbers of scored tokens)}, (n,) each, for the modes in which the model has a value.

    From left to right (draws = 0) three passes give five modes: without the future, a token's NLL is that of the
    unconditional pass. Random draws have no such reading: their chains condition on later tokens.
    """
    tokens, modes = questions.tokens, {}
    nothing_known = torch.zeros_like(tokens, dtype=torch.bool)

    def nll(cond, name):
        found = [nll_of(model, config, tokens, cond, name, generator) for generator in seeded(config, draws)]
        return sum(found) / len(found)

    blind = nll(nothing_known, "unconditional")
    for name, mode in modes_with(config.law).items():
        cond = questions.cond[mode.law] if mode.law else nothing_known
        if mode.future and model.can_condition_on(cond):
            modes[name] = (nll(cond, name).sum(1), (~cond).sum(1))
        elif not mode.future and (mode.law is None or not draws):
            modes[name] = ((blind * ~cond).sum(1), (~cond).sum(1))
    return modes


def asked_of(config, questions):
    """The questions that this method answers: all, or of MLM, which takes a pass for each token, the first few."""
    n = len(questions.tokens) if METHODS[config.method].one_pass else config.mlm_sequences
    return EvaluationSet(questions.tokens[:n], {name: cond[:n] for name, cond in questions.cond.items()})


def evaluate(config, state, questions, split):
    """All that there is to say about one run on one split -> a list of results, each of which is a JSON file too.

    A method has one way to be scored, or several (sigma-GPT's orders).
    """
    model, results, asked = restore(config, state), [], asked_of(config, questions)
    for reading, draws in model.readings:
        modes = five_modes(model, config, asked, draws)
        result = {
            "run": config.out_dir, "split": split, "method": config.method, "reading": reading, "draws": draws, "bound": model.bound,
            "law": config.law, "r_max": config.r_max, "eval_seed": config.eval_seed, "evaluation_set": questions.hash,
            "checkpoint": Path(state["path"]).name, "iter": state["iter"], "commit": git_commit(), "config": asdict(config),
            "modes": {name: {**statistics(*mode), "nll": mode[0].tolist(), "scored": mode[1].tolist()} for name, mode in modes.items()},
        }  # fmt: skip
        more = [reading.replace(" ", "_"), config.adapter and f"with_{Path(config.adapter).parent.name}"]
        name = "_".join([f"eval_{split}_r{config.r_max:g}", *filter(None, more)]) + ".json"
        with whole_file(Path(config.out_dir) / name, "w") as file:
            json.dump(result, file)
        results.append(result)
    return results


def first(result, mode, n):
    """(sums, counts) of the first n sequences of a result in a mode."""
    return tuple(torch.tensor(result["modes"][mode][name][:n], dtype=torch.float64) for name in ("nll", "scored"))


def gain_bits(result, law, n):
    """What seeing the future saves, in bits per token, and its standard error; paired, sequence by sequence, so that this is
    far smaller than that of either perplexity.
    """
    (seeing, counts), (blind, _) = first(result, law, n), first(result, f"{law}_no_future", n)
    return [x / math.log(2) for x in mean_and_error(blind - seeing, counts)]


def chain_rule_violations(model, config, questions):
    """How far the conditionals are from those of one joint -> {reading: {mode: (violations in nats, tokens of B)}}, (n,) each.

    Cut x_e at random into a left part A and the rest, B. One joint demands log p(A, B | C) = log p(A | C) + log p(B | A, C).
    Behind its first part, p(A | C), the chain of the left side goes on with A before B in the body; the last term is a query
    of its own, with A in x_c. The violation is the NLL of B in the first less that in the second: positive where A helps more
    in x_c. Where the order is free, the parts may also change places ("swapped"). {} where there are only bounds.
    """
    tokens, found = questions.tokens, {}
    if model.bound:
        return found
    for name, cond in {"unconditional": torch.zeros_like(tokens, dtype=torch.bool), **questions.cond}.items():
        if not model.can_condition_on(cond):
            continue
        count = (~cond).cumsum(1)  # of unknown tokens so far
        generator = torch.Generator().manual_seed(config.eval_seed)  # the first n of more questions are cut alike
        cut = 1 + uniform_int(count[:, -1:] - 1, (len(tokens), 1), generator)
        left, right = ~cond & (count <= cut), ~cond & (count > cut)
        for reading, draws in model.readings:
            for A, B, swapped in [(left, right, ""), (right, left, ", swapped")][: 1 + bool(draws)]:
                # of random orders the first, the same in both
                before = nll_of(model, config, tokens, cond, name, seeded(config, draws)[0], B)
                known = nll_of(model, config, tokens, cond | A, name, seeded(config, draws)[0], B)
                found.setdefault(reading + swapped, {})[name] = (before - known).sum(1), B.sum(1)
    return found


def consistency(config, state, questions):
    """{reading: {mode: {"absolute": mean |violation|, "signed": mean, "stderr": of that one, "tokens", "sequences"}}}, in bits
    per token of B.
    """

    def bits(violations, counts):
        signed, error = (x / math.log(2) for x in mean_and_error(violations, counts))
        absolute = mean_and_error(violations.abs(), counts)[0] / math.log(2)
        return {
            "absolute": absolute,
            "signed": signed,
            "stderr": error,
            "tokens": int(counts.sum()),
            "sequences": len(counts),
        }

    found = chain_rule_violations(restore(config, state), config, asked_of(config, questions))
    return {reading: {mode: bits(*pair) for mode, pair in modes.items()} for reading, modes in found.items()}


def print_consistency(run, found):
    print(f"{run}\n\n{'':23}{'tokens of B':>12}{'|violation|':>14}{'signed':>22}   in bits per token of B")
    for reading, modes in found.items():
        for mode, v in modes.items():
            signed = f"{v['signed']:+.4f} +- {v['stderr']:.4f}"
            print(f"{TITLES.get(mode, mode):23}{v['tokens']:12}{v['absolute']:14.4f}{signed:>22}   {reading}".rstrip())
    print()


TITLES = {"training": "training distribution"}


def table(results, asked):
    """The results side by side, perplexity +- standard error; for byte models bits per byte beside it.

    Where some answered fewer questions than were asked, a table of its own compares all of them on those.
    """
    counts = sorted({result["modes"]["unconditional"]["sequences"] for result in results})
    tables = [table_of([r for r in results if r["modes"]["unconditional"]["sequences"] >= n], n) for n in counts[::-1]]
    titles = [f"on the first {n} sequences:\n\n" * (n < asked) for n in counts[::-1]]
    return "\n\n".join(title + text for title, text in zip(titles, tables))


def table_of(results, n):
    """One table, of the first n sequences."""
    of_bytes = results[0]["config"]["tokenizer"] == "bytes"
    runs = [Path(r["run"]).name for r in results]
    if len(set(runs)) < len({r["run"] for r in results}) or "" in runs:
        runs = [r["run"] for r in results]
    names = [run + f", {r['reading']}" * bool(r["reading"]) for run, r in zip(runs, results)]
    width = max(28, *(len(name) + 2 for name in names))

    def line(title, tokens, cells):
        return (f"{title:23}{tokens:>9}" + "".join(f"{cell:>{width}}" for cell in cells)).rstrip()

    def cell(result, found):
        text = "<= " * result["bound"] + f"{found['perplexity']:.3f} +- {found['stderr']:.3f}"
        return text + f" ({math.log2(found['perplexity']):.3f})" * of_bytes

    lines = [line("", "", names), line("", "tokens", ["perplexity" + " (bits per byte)" * of_bytes] * len(results))]
    modes = list(dict.fromkeys(mode for law in [r["law"] for r in results] for mode in modes_with(law)))
    for mode in sorted(modes, key=lambda mode: modes.index(mode.removesuffix("_no_future"))):  # pairs stand together
        title = "  without the future" if mode.endswith("_no_future") else TITLES.get(mode, mode)
        found = [statistics(*first(r, mode, n)) if mode in r["modes"] else None for r in results]
        tokens = {f["tokens"] for f in found if f}
        assert len(tokens) <= 1, f"{mode}: the runs are scored on {sorted(tokens)} tokens"
        lines.append(line(title, *(tokens or "-"), [cell(r, f) if f else "-" for r, f in zip(results, found)]))
    saved = [line("saved by the future", "", ["bits per token"] * len(results))]
    for mode in modes:
        found = [{mode, f"{mode}_no_future"} <= set(r["modes"]) for r in results]
        if any(found):
            gains = [gain_bits(r, mode, n) if f else None for r, f in zip(results, found)]
            cells = [f"{gain[0]:.4f} +- {gain[1]:.4f}" if gain else "-" for gain in gains]
            saved.append(line(f"  {TITLES.get(mode, mode)}", "", cells))
    return "\n".join([*lines, *["", *saved] * (len(saved) > 1)])


# ---------------------------------------------------------------- the score of a text of yours


def encode_marked(tokenizer, text, mark, ids_of=None):
    """Text with marked places -> (ids, known), two lists as long as the tokens; what is marked is not known.

    mark: a regular expression whose first group is the marked text. ids_of(match, space): ids in place of that text; space: the
    one that belongs to its first word, or "".
    """
    ids, known, end = [], [], 0
    for match in re.finditer(mark, text):
        before, carried = text[end : match.start()], ""
        if tokenizer.words_carry_their_space and before.endswith(" "):
            before, carried = before[:-1], " "
        known_ids = encode(tokenizer, before)
        marked_ids = ids_of(match, carried) if ids_of else encode(tokenizer, carried + match[1])
        ids += known_ids + marked_ids
        known += [True] * len(known_ids) + [False] * len(marked_ids)
        end = match.end()
    rest = encode(tokenizer, text[end:])
    return ids + rest, known + [True] * len(rest)


def check_length(what, n, config):
    if n > config.block_size:
        raise UserError(f"{what}: {n} tokens are more than block_size = {config.block_size}: shorten the text")


def score_text(model, config, text):
    """Print log p(marked | rest), token by token and in total, for text with [[marked]] parts."""
    tokenizer = get_tokenizer(config.tokenizer)
    mark = r"(?s)\[\[((?:(?!\[\[|\]\]).)+)\]\]"  # [[ ]] around something that holds neither
    if re.search(r"\[\[|\]\]", re.sub(mark, "", text)):
        raise UserError(f"--text: the marks in {text[:40]!r} do not pair: write [[words]], not empty and not nested")
    ids, known = encode_marked(tokenizer, text, mark)
    if all(known):
        raise UserError(f"--text: nothing is marked in {text[:40]!r}: put [[ ]] around what is to be scored")
    check_length("--text", len(ids), config)
    tokens, cond = torch.tensor([ids]), torch.tensor([known])
    if not model.can_condition_on(cond):
        raise UserError(f"--text: {config.method} knows the past alone: nothing may follow the last ]]")
    if model.bound:
        raise UserError(f"--text: {config.method} has no log p, only a bound: take a run of another method")
    nll = nll_of(model, config, tokens, cond, "scoring")[0].tolist()
    for i, value, is_known in zip(ids, nll, known):
        if not is_known:
            print(f"{-value:9.4f}  {math.exp(-value):9.3g}  {tokenizer.decode([i])!r}")
    n, reading = known.count(False), model.readings[0][0]
    print(
        f"{-sum(nll):9.4f}  = log p([[..]] | rest), {n} tokens; {sum(nll) / n / math.log(2):.4f} bits per token"
        + f", {reading}" * bool(reading)
    )


def questions_of(runs, split):
    """The evaluation sets of runs, (config, state) each; UserError if one would be asked other questions than another."""
    questions = [evaluation_set(config, split) for config, _ in runs]
    for a, b in itertools.combinations(questions, 2):
        if a.hash != b.hash or not all(torch.equal(a.cond[law], b.cond[law]) for law in a.cond.keys() & b.cond.keys()):
            fix = "give one --r_max and one law's settings for all, and runs of one data set, tokenizer and block_size"
            raise UserError(f"these runs would be asked different questions: {fix}")
    return questions


@dataclass
class Options:
    split: str = key("val", "which split is asked about", choices=("val", "test", "train"))
    checkpoint: str = key("best.pt", "which checkpoint of the run; ckpt.pt is the latest")
    consistency: bool = key(False, "does log p(A, B | C) = log p(A | C) + log p(B | A, C) hold?")
    samples: bool = key(False, "score the runs' samples_*.jsonl: share of tokens restored")
    mauve: bool = key(False, "and their MAUVE")
    mauve_model: str = key(
        "gpt2-large", "--mauve: model of the features; a run folder, or a name or folder for transformers"
    )
    mauve_buckets: int | None = key(None, "--mauve: clusters; None: a tenth of the texts", low=2)
    text: str | None = key(None, "text with [[marked]] parts to score given all the rest")


TAKES = {
    "text": ("checkpoint",),
    "consistency": ("split", "checkpoint"),
    "samples": ("checkpoint",),
    "mauve": ("checkpoint", "mauve_model", "mauve_buckets"),
    None: ("split", "checkpoint"),
}


def main(argv):
    places, given, options = parse(argv, Options, __doc__)
    task = task_of(options, TAKES)
    if not places:
        raise UserError("name a config file or run folders: python evaluate.py configs/tiny.py")
    if task == "text":
        for place in places:
            if len(places) > 1:
                print(place)
            score_text(*open_run(place, given, options.checkpoint)[:2], options.text)
        return
    runs = [find_run(place, given, options.checkpoint) for place in places]
    if task in ("samples", "mauve"):
        import generation  # which imports from here

        return generation.print_samples(runs, options)
    questions = questions_of(runs, options.split)
    (config, _), (n, T) = runs[0], questions[0].tokens.shape
    about = f"{config.dataset}, {options.split}: {n} sequences of {T} tokens"
    about += f", r_max {config.r_max:g}, evaluation set {questions[0].hash}\n"
    if task == "consistency":
        if bounds := [config.out_dir for config, _ in runs if METHODS[config.method].bound]:
            raise UserError(f"--consistency: {bounds[0]} has no log p, only a bound: leave it out")
        print(about)
        for run, asked in zip(runs, questions):
            print_consistency(run[0].out_dir, consistency(*run, asked))
        return
    results = [result for run, asked in zip(runs, questions) for result in evaluate(*run, asked, options.split)]
    print(f"{about}\n{table(results, n)}")


if __name__ == "__main__":
    run(main)

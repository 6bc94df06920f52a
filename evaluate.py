"""Perplexity in the five modes of the paper, on questions that are the same for every model.

    python evaluate.py configs/tiny.py                      the table, also as eval_val_r0.6.json in the run's folder
    python evaluate.py out/A out/B --r_max=0.6              several runs side by side
    python evaluate.py configs/tiny.py --split=test
    python evaluate.py configs/tiny.py --text "The state of the [[Union]] is strong"

The last one prints log p([[..]] | all the rest). A space in front of [[ belongs to the marked part if the tokenizer
joins spaces to the words after them (GPT-2's), else it is known.
Perplexity = exp(total NLL / number of tokens), over all scored tokens of all sequences (paper, Section 4.1). This file
draws no samples and trains nothing.
"""

import hashlib
import json
import math
import os
import re
import subprocess
import zipfile
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

import conditioning
from checkpoint import autocast, find_run, open_run, restore
from conditioning import LAWS, EvaluationSet, draw_evaluation_set, modes_with
from config import UserError, key, parse, run, whole_file
from prepare_data import encode, file_sha256, get_tokenizer, read_chunks, read_meta

# ---------------------------------------------------------------- the questions


def evaluation_set(config, split):
    """The questions of a data set, drawn once and kept beside it as eval_<split>_<hash of what was asked>.npz."""
    chunks = read_chunks(config, split)
    names = ("block_size", "eval_sequences", "eval_seed", "r_min", "r_max", "b_min", "b_max")
    laws = [*LAWS, file_sha256(conditioning.__file__)]  # a changed law asks other questions
    asked = json.dumps([read_meta(config)["sha256"][split], laws, *(getattr(config, name) for name in names)])
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
def nll_of(model, config, tokens, cond, desc):
    """exact_nll over all questions, batch by batch: (n, T) on the CPU, 0 for known tokens."""
    parts = []
    # disable=None: no bar where nobody watches
    for x, c in tqdm(batches(config, tokens, cond), desc, leave=False, disable=None):
        with autocast(config):
            parts.append(model.exact_nll(x, c).cpu().double())
    return torch.cat(parts)


def mean_and_error(nll, scored):
    """(n, T), (n, T) -> mean over all scored tokens, and its standard error with sequences as the independent units."""
    sums, counts = (nll * scored).sum(1), scored.sum(1)
    n, mean = len(sums), (sums.sum() / counts.sum()).item()
    spread = (sums - mean * counts).square().sum().sqrt().item()  # the ratio estimator's
    return mean, spread * math.sqrt(n / (n - 1)) / counts.sum().item() if n > 1 else math.nan


def statistics(nll, scored):
    """nll in nats, scored (n, T) -> perplexity, its standard error, and how much they are over."""
    mean, error = mean_and_error(nll, scored)
    perplexity, tokens = math.exp(mean) if mean < 700 else math.inf, int(scored.sum())
    return {"perplexity": perplexity, "stderr": perplexity * error, "tokens": tokens, "sequences": len(nll)}


def five_modes(model, config, questions):
    """{mode: statistics} for the modes in which the model has a value, and {law: (gain, stderr)} of seeing the future.

    Three passes give five modes: without the future, a token's NLL is that of the unconditional pass. The gain, in bits
    per token, is paired, sequence by sequence; so its error is far smaller than that of either perplexity.
    """
    nothing_known = torch.zeros_like(questions.tokens, dtype=torch.bool)
    blind = nll_of(model, config, questions.tokens, nothing_known, "unconditional")
    modes, gain = {}, {}
    for name, mode in modes_with(config.law).items():
        cond = questions.cond[mode.law] if mode.law else nothing_known
        if not mode.future:
            modes[name] = statistics(blind, ~cond)
        elif model.can_condition_on(cond):
            seeing = nll_of(model, config, questions.tokens, cond, name)
            modes[name] = statistics(seeing, ~cond)
            gain[name] = [x / math.log(2) for x in mean_and_error(blind - seeing, ~cond)]
    return modes, gain


def evaluate(config, state, questions, split):
    """All that there is to say about one run on one split, as it goes into its JSON file."""
    modes, gain = five_modes(restore(config, state), config, questions)
    result = {
        "run": config.out_dir, "split": split, "method": config.method, "law": config.law, "r_max": config.r_max,
        "eval_seed": config.eval_seed, "evaluation_set": questions.hash, "checkpoint": Path(state["path"]).name,
        "iter": state["iter"], "commit": git_commit(), "config": asdict(config), "modes": modes, "gain_bits": gain,
    }  # fmt: skip
    with whole_file(Path(config.out_dir) / f"eval_{split}_r{config.r_max:g}.json", "w") as file:
        json.dump(result, file, indent=1)
    return result


def git_commit():
    """The commit of this code, '+' behind it when files differ from it, or None outside a repository."""
    here = Path(__file__).parent
    try:
        out = subprocess.run(
            ["git", "describe", "--always", "--dirty=+", "--abbrev=12"], cwd=here, capture_output=True, text=True
        )
    except OSError:
        return None
    return out.stdout.strip() or None


TITLES = {"training": "training distribution"}


def table(results):
    """The runs side by side, perplexity +- standard error; for byte models bits per byte beside it."""
    of_bytes = results[0]["config"]["tokenizer"] == "bytes"
    names = [Path(r["run"]).name for r in results]
    width = max(28, *(len(name) + 2 for name in names))

    def line(title, tokens, cells):
        return (f"{title:23}{tokens:>9}" + "".join(f"{cell:>{width}}" for cell in cells)).rstrip()

    lines = [line("", "", names), line("", "tokens", ["perplexity" + " (bits per byte)" * of_bytes] * len(results))]
    modes = list(dict.fromkeys(mode for law in [r["law"] for r in results] for mode in modes_with(law)))
    for mode in sorted(modes, key=lambda mode: modes.index(mode.removesuffix("_no_future"))):  # pairs stand together
        title = "  without the future" if mode.endswith("_no_future") else TITLES.get(mode, mode)
        found = [r["modes"].get(mode) for r in results]
        cells = [f"{m['perplexity']:.3f} +- {m['stderr']:.3f}" if m else "-" for m in found]
        if of_bytes:
            cells = [cell + f" ({math.log2(m['perplexity']):.3f})" if m else cell for cell, m in zip(cells, found)]
        lines.append(line(title, next((m["tokens"] for m in found if m), "-"), cells))
    lines += ["", line("saved by the future", "", ["bits per token"] * len(results))]
    for mode in modes:
        found = [r["gain_bits"].get(mode) for r in results]
        if any(found):
            cells = [f"{gain[0]:.4f} +- {gain[1]:.4f}" if gain else "-" for gain in found]
            lines.append(line(f"  {TITLES.get(mode, mode)}", "", cells))
    return "\n".join(lines)


# ---------------------------------------------------------------- the score of a text of yours


def encode_marked(tokenizer, text, mark, ids_of=None):
    """Text with marked places -> (ids, known), two lists as long as the tokens; what is marked is not known.

    mark: a regular expression whose first group is the marked text. ids_of(match): ids in place of that text, for blanks.
    """
    ids, known, end = [], [], 0
    for match in re.finditer(mark, text):
        before, carried = text[end : match.start()], ""
        if tokenizer.words_carry_their_space and before.endswith(" "):
            before, carried = before[:-1], " "
        known_ids = encode(tokenizer, before)
        marked_ids = ids_of(match) if ids_of else encode(tokenizer, carried + match[1])
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
    nll = nll_of(model, config, tokens, cond, "scoring")[0].tolist()
    for i, value, is_known in zip(ids, nll, known):
        if not is_known:
            print(f"{-value:9.4f}  {math.exp(-value):9.3g}  {tokenizer.decode([i])!r}")
    n = known.count(False)
    print(f"{-sum(nll):9.4f}  = log p([[..]] | rest), {n} tokens; {sum(nll) / n / math.log(2):.4f} bits per token")


@dataclass
class Options:
    split: str = key("val", "which split is asked about", choices=("val", "test", "train"))
    checkpoint: str = key("best.pt", "which checkpoint of the run; ckpt.pt is the latest")
    text: str | None = key(None, "text with [[marked]] parts to score given all the rest")


def main(argv):
    places, given, options = parse(argv, Options, __doc__)
    if not places:
        raise UserError("name a config file or run folders: python evaluate.py configs/tiny.py")
    if options.text is not None:
        for place in places:
            if len(places) > 1:
                print(place)
            score_text(*open_run(place, given, options.checkpoint)[:2], options.text)
        return
    runs = [find_run(place, given, options.checkpoint) for place in places]
    questions = [evaluation_set(config, options.split) for config, _ in runs]
    if len({q.hash for q in questions}) > 1:
        fix = "give one --r_max for all, and runs of one data set, tokenizer and block_size"
        raise UserError(f"these runs would be asked different questions: {fix}")
    results = [evaluate(*run, asked, options.split) for run, asked in zip(runs, questions)]
    (config, _), (n, T) = runs[0], questions[0].tokens.shape
    about = f"{config.dataset}, {options.split}: {n} sequences of {T} tokens"
    print(f"{about}, r_max {config.r_max:g}, evaluation set {questions[0].hash}\n\n{table(results)}")


if __name__ == "__main__":
    run(main)

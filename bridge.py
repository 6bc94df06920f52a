"""Two ways to use what stands behind a gap: AC-GPT looks at it while it writes, COrAL repairs a draft that did not.

    python bridge.py CORAL_RUN AC_GPT_RUN --start=24                         an answer of a task, from token 24 on
    python bridge.py CORAL_RUN AC_GPT_RUN GPT_RUN --start=120 --length=16    a gap in a text; GPT fills it, too, and judges

Each may call its model n or 2n times for a gap of n tokens, and takes the likeliest tokens. AC-GPT needs a call for each token: from the
left, given all outside the gap; then once more from the right, given all other tokens. COrAL drafts four tokens or one a call, not
seeing what stands behind, and in each call that is left predicts the whole gap anew.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm

from checkpoint import git_commit, machine_name, open_run
from config import UserError, key, parse, run, whole_file
from coral import predict
from coral_runs import decoder_of, open_for_decoding
from evaluate import mean_and_error, nll_of
from prepare_data import read_chunks
from sample import sampler


@dataclass
class Options:
    start: int = key(24, "how many tokens stand before the gap", low=1)
    length: int | None = key(None, "tokens of the gap; None: up to the end", low=1)
    n: int = key(300, "how many sequences", low=1)
    split: str = key("test", "whose sequences", choices=("val", "test"))
    results: str = key("results", "folder for what is found")


def fill(model, tokens, gap):
    """From the left, given all outside the gap (GPT: all before it). tokens (n, T), gap: a slice of 0 .. T - 1."""
    cond = torch.ones_like(tokens, dtype=torch.bool)
    cond[:, gap] = False
    return model.generate(tokens, cond, sampler("cpu", 0, 1.0, 0)).cpu()


def from_the_right(model, tokens, gap):
    """Each token of the gap once more, the last one first: the likeliest given all others."""
    tokens = tokens.clone()
    for t in reversed(range(gap.start, gap.stop)):
        alone = torch.zeros_like(tokens, dtype=torch.bool)
        alone[:, t] = True
        tokens[:, t] = model.body.head(model.hidden(tokens, ~alone, alone)).argmax(-1).cpu()
    return tokens


def repair(decoder, tokens, gap, calls):
    """Draft the gap of one sequence (T,), decoder.k_f tokens a call; the other calls predict all of it anew, in view of what is behind."""
    slots = [decoder.eos, *tokens.tolist()]
    s, e, P = gap.start + 1, gap.stop, 1 + gap.start  # of slots; what the prompt's last slot says comes first

    def ask(y, s, e):
        return predict(decoder, y, P, s, e, torch.ones(len(y))).argmax(-1).tolist()

    y, behind, start = slots[:s], slots[e + 1 :], decoder.calls
    while len(y) <= e:
        y += ask(y, len(y), min(len(y) + decoder.k_f - 1, e))
    y += behind
    while decoder.calls < start + calls:
        y[s : e + 1] = ask(y, s, e)
    return torch.tensor(y[1:])


def ways(coral, config, ac_gpt, gpt, tokens, gap):
    """Name, calls, and the filled sequences (n, T) of each way."""
    n = gap.stop - gap.start
    if gpt:
        yield "GPT, from the left", n, fill(gpt, tokens, gap)
    once = fill(ac_gpt, tokens, gap)
    yield "AC-GPT, from the left", n, once
    yield "AC-GPT, and again from the right", 2 * n, from_the_right(ac_gpt, once, gap)
    for k_f in (config.k_f, 1):
        for calls in (n, 2 * n):
            rows, decoder = tqdm(tokens, "COrAL", leave=False, disable=None), decoder_of(coral, config, k_f=k_f)
            yield f"COrAL, draft of {k_f} a call", calls, torch.stack([repair(decoder, x, gap, calls) for x in rows])


@torch.no_grad()
def main(argv):
    places, given, options = parse(argv, Options, __doc__)
    if len(places) not in (2, 3):
        raise UserError("name a run of coral, one of ac_gpt, and for texts one of gpt: see --help")
    coral, config, _ = open_for_decoding(places[0], given)
    others = [open_run(place, given)[:2] for place in places[1:]]
    for place, (_, other), method in zip(places[1:], others, ("ac_gpt", "gpt")):
        if (found := (other.method, other.data_folder, other.block_size)) != (
            asked := (method, config.data_folder, config.block_size)
        ):
            raise UserError(f"{place}: method, data, block_size are {found}, not {asked}: name another run")
    stop = options.start + options.length if options.length else config.block_size
    if not options.start < stop <= config.block_size:
        raise UserError(
            f"--start={options.start} with --length={options.length} is not within {config.block_size} tokens: lower them"
        )
    tokens = torch.from_numpy(read_chunks(config, options.split)[: options.n].astype("int64"))
    gap, gpt = slice(options.start, stop), others[1] if len(others) > 1 else (None, None)
    scored = torch.zeros_like(tokens, dtype=torch.bool)
    scored[:, options.start :] = True
    found, n = [], stop - options.start
    print(f"{config.dataset}, {options.split}: {len(tokens)} sequences, a gap of {n} tokens behind {options.start}")
    print(f"{'':36}calls    restored, %       whole, %" + "   bits by GPT" * bool(gpt[0]))
    for name, calls, filled in [("the original", 0, tokens), *ways(coral, config, others[0][0], gpt[0], tokens, gap)]:
        right = (filled == tokens)[:, gap]
        one = {
            "way": name,
            "calls": calls,
            "restored": mean_and_error(right.sum(1).double(), torch.full((len(right),), n)),
        }
        one["whole"] = mean_and_error(right.all(1).double(), torch.ones(len(right)))
        line = f"{name:36}{calls:5}" + "".join(
            "{:9.1f} +- {:.1f}".format(*(100 * x for x in one[k])) for k in ("restored", "whole")
        )
        if gpt[0]:
            bits = nll_of(*gpt, filled, torch.zeros_like(scored), "judge", scored=scored).sum(1) / math.log(2)
            one["bits"] = mean_and_error(bits, torch.ones(len(bits)))
            line += "{:8.1f} +- {:.1f}".format(*one["bits"])
        found.append(one)
        print(line, flush=True)
    file = Path(options.results) / f"bridge/{config.dataset}_{options.start}_{n}_s{config.seed}.json"
    about = {
        "runs": places,
        "split": options.split,
        "n": len(tokens),
        "scored_by": git_commit(),
        "machine": machine_name(config),
    }
    with whole_file(file, "w") as out:
        json.dump({**about, "ways": found}, out, indent=1)


if __name__ == "__main__":
    run(main)

"""Fill in blanks, rewrite, continue a text; draw samples by the paper's protocol.

    python sample.py configs/tiny.py                                              one validation text in each mode
    python sample.py configs/tiny.py --text "We the ____8 of the United States"    8 tokens that fit
    python sample.py configs/tiny.py --text "The ____ of the [[United]] States" --n=3 --lengths=3-12
    python sample.py configs/tiny.py --text "The ____ is just." --candidates "war|cause of peace"
    python sample.py configs/tiny.py --file=letter.txt --json                      marks in a file; - is standard input
    python sample.py configs/tiny.py --prompt "Fellow citizens" --max_new_tokens=100
    python sample.py configs/tiny.py --protocol=paper --mode=infilling --n=241     into samples_infilling.jsonl of the run

____8 is a blank of 8 tokens (all digits that follow count), ____ one of any length in --lengths, [[words]] are to be rewritten. All the
rest is known, spaces too; only where a tokenizer joins spaces to the words after them (GPT-2's), the one space in front of a
mark belongs to what is filled in. --tries fillings of each length are drawn, and the best --n printed behind their log p(text);
infill.py says why it is that. Generated parts are printed as [[..]]. This file trains nothing.
"""

import itertools
import json
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm

import infill
from checkpoint import autocast, open_run
from conditioning import MODES
from config import UserError, key, parse, run, task_of, whole_file
from evaluate import check_length, evaluation_set
from prepare_data import encode, file_sha256, get_tokenizer

PROMPT = 20  # tokens of the unconditional mode's prompt (paper, Appendix A)


def sampler(device, temperature, top_p, seed):
    """A function logits (B, V) -> ids (B,): nucleus sampling (Holtzman et al., 2020); temperature 0 takes the likeliest.

    In float64: float32 rounds small probabilities in a way that acts like a lower temperature. MPS has none, so the CPU.
    """
    device = "cpu" if device == "mps" else device
    generator = torch.Generator(device).manual_seed(seed)

    def pick(logits):
        if temperature < 1e-6:
            return logits.argmax(-1)
        p = (logits.to(device).double() / temperature).softmax(-1)
        p, order = p.sort(-1, descending=True)
        beyond = p.cumsum(-1) - p >= top_p  # the token that crosses top_p stays
        beyond[..., 0] = False
        p = p.masked_fill(beyond, 0.0)
        drawn = torch.multinomial(p, 1, generator=generator)
        return order.gather(-1, drawn)[:, 0].to(logits.device)

    return pick


def order_generator(model, seed, forced):
    """For orders and masks, another stream than the tokens'. sigma-GPT takes what is forced from left to right: None."""
    return torch.Generator().manual_seed(seed ^ 1) if forced is None or model.bound else None


def generate(model, config, options, tokens, cond, forced=None, seed=None):
    """model.generate with the options' sampler, each method in its own way: all (B, T) -> (B, T) on the CPU."""
    seed = options.seed if seed is None else seed
    pick = sampler(config.device, options.temperature, options.top_p, seed)
    with autocast(config):
        return model.generate(tokens, cond, pick, order_generator(model, seed, forced), forced).cpu()


def show(tokenizer, ids, known):
    """Text in which the generated parts stand in marks."""
    runs = itertools.groupby(zip(ids, known), lambda pair: pair[1])
    texts = ((tokenizer.decode([i for i, _ in pairs]), is_known) for is_known, pairs in runs)
    return "".join(text if is_known else f"[[{text}]]" for text, is_known in texts)


# ---------------------------------------------------------------- marked text


def read_text(options):
    """--text, or what --file holds."""
    if options.text is not None:
        return options.text
    try:
        text = sys.stdin.read() if options.file == "-" else Path(options.file).read_text("utf-8-sig")
        return text.removesuffix("\n")  # as a line of its own ends; print adds it again
    except (OSError, UnicodeDecodeError) as e:
        raise UserError(
            f"--file: cannot read {options.file} ({getattr(e, 'strerror', None) or e}): give a text file"
        ) from None


def read_lengths(options, config):
    """--lengths=1-12 -> range(1, 13)"""
    low, _, high = options.lengths.partition("-")
    if not (low.isdecimal() and (high or low).isdecimal() and 1 <= int(low) <= int(high or low) <= config.block_size):
        raise UserError(
            f"--lengths={options.lengths}: give a range in 1 .. {config.block_size} (block_size), like 1-12"
        )
    return range(int(low), int(high or low) + 1)


def fill(model, config, options, tokenizer):
    """Print the best fillings of a marked text."""
    marked = infill.Marked(tokenizer, read_text(options), config.block_size)

    def draw(ids, known):
        copies = [x.expand(max(options.tries, options.n), -1) for x in (ids, known)]
        return generate(model, config, options, *copies)

    if options.candidates is not None:
        found = infill.rank_given(model, config, marked, options.candidates.split("|"))
        shares = torch.tensor([c.log_p for c in found], dtype=torch.float64).softmax(0).tolist()
    else:
        one = marked.encode([place or 1 for place in marked.places])
        if not model.can_condition_on(torch.tensor([one[1]])):
            print(f"note: {config.method} fills a blank from what stands before it alone", file=sys.stderr)
        if model.bound:
            print(f"note: {config.method} has no log p: what it draws is not ranked", file=sys.stderr)
        found = infill.fill(model, config, marked, read_lengths(options, config), draw)[: options.n]
        shares = [None] * len(found)
    for c, share in zip(found, shares):
        if options.json:
            drawn = iter(i for i, is_known in zip(c.ids, c.known) if not is_known)
            fillings = [tokenizer.decode(list(itertools.islice(drawn, size))) for size in c.sizes]
            about = {"text": tokenizer.decode(c.ids), "fillings": fillings, "log_p": c.log_p, "p": share}
            print(json.dumps({name: value for name, value in about.items() if value is not None}))
        else:
            numbers = [form.format(x) for form, x in (("{:9.2f}", c.log_p), ("{:7.2%}", share)) if x is not None]
            print(*numbers, show(tokenizer, c.ids, c.known), sep="  ")


def continue_text(model, config, options, tokenizer):
    """Print --prompt and what follows it. The prompt is forced in the body, x_c is empty."""
    ids = encode(tokenizer, options.prompt)
    n = options.max_new_tokens or min(200, config.block_size - len(ids))
    check_length("--prompt and --max_new_tokens", len(ids) + max(n, 1), config)
    tokens = torch.tensor(ids + [0] * n).expand(options.n, -1)
    forced = (torch.arange(tokens.size(1)) < len(ids)).expand_as(tokens)
    for row in generate(model, config, options, tokens, torch.zeros_like(forced), forced):
        print(show(tokenizer, row.tolist(), forced[0].tolist()))


# ---------------------------------------------------------------- the five modes


def asked_in(name, questions):
    """Of a mode: known (n, T), which in a mode with the future is x_c; in one without, it is forced in the body. Unconditional: a
    prompt of 20 tokens.
    """
    prompt = torch.arange(questions.tokens.size(1)) < PROMPT
    return questions.cond[MODES[name].law] if MODES[name].law else prompt.expand_as(questions.tokens)


def has_mode(model, name, known):
    """Can the method be sampled in this mode, and is there anything to sample?"""
    mode = MODES[name]
    if known.all(1).any():
        return False  # T is no longer than the prompt
    return model.can_condition_on(known) if mode.future else mode.law is None or not model.bound


def given_in(name, known):
    """What is known in a mode, as x_c and as what is forced in the body (None: nothing more)."""
    return (known, None) if MODES[name].future else (torch.zeros_like(known), known)


def show_modes(model, config, options, tokenizer):
    """Print the first validation question, answered in each mode."""
    questions = evaluation_set(config, "val")
    for name in MODES:
        known = asked_in(name, questions)[:1]
        if not has_mode(model, name, known):
            continue
        rows = [x[:1].expand(options.n, -1) for x in (questions.tokens, known)]
        for row in generate(model, config, options, rows[0], *given_in(name, rows[1])):
            print(f"--- {name.replace('_', ' ')}\n{show(tokenizer, row.tolist(), known[0].tolist())}\n", flush=True)


# ---------------------------------------------------------------- the paper's protocol


def log_p_of(model, config, name, tokens, known, seed):
    """log p of what was sampled, in nats, in the order in which it was, with temperature 1: [B floats]. None where it would take a
    pass for each token, or is only a bound.
    """
    if model.bound or not model.one_pass:
        return [None] * len(tokens)
    cond, forced = given_in(name, known)
    with torch.no_grad(), autocast(config):
        nll = model.exact_nll(tokens, cond, ~known, order_generator(model, seed, forced))
    return (-nll.cpu().double().sum(1)).tolist()


def runs_of(known):
    """[True, True, False, True] -> [[0, 2], [3, 4]], the known places as half-open ranges."""
    edges = torch.tensor([False, *known, False]).int().diff().nonzero()[:, 0].tolist()
    return [list(pair) for pair in zip(edges[::2], edges[1::2])]


def read_samples(path, about):
    """The samples of a file, [] where there is none. UserError if others than those `about` describes are in it."""
    samples = []
    try:
        lines = path.read_text("utf-8").splitlines(keepends=True) if path.exists() else ()
    except (OSError, UnicodeDecodeError) as e:
        raise UserError(f"{path} cannot be read ({type(e).__name__}): move the file away") from None
    for line in lines:
        if not line.endswith("\n"):
            break  # a kill in the middle of it
        try:
            sample = json.loads(line)
            other = next((name for name in about if sample[name] != about[name]), None)
        except (ValueError, KeyError, TypeError):
            raise UserError(f"{path}, line {len(samples) + 1} is no sample of ours: move the file away") from None
        if other:
            fix = "move the file away, or give the same settings"
            raise UserError(f"{path} holds samples with {other} = {sample[other]}, not {about[other]}: {fix}")
        samples.append(sample)
    return samples


def protocol(model, config, options, tokenizer, state):
    """The paper's samples (Appendix A): n validation questions in a mode, or in all that the method has, one JSON a line. Batches have
    seeds of their own, so an interrupted file goes on as if nothing had happened.
    """
    questions, B = evaluation_set(config, "val"), config.batch_size
    if options.n > len(questions.tokens):
        raise UserError(f"--n={options.n}: the evaluation set has {len(questions.tokens)} sequences (eval_sequences)")
    about = {"checkpoint": file_sha256(state["path"])[:16], "iter": state["iter"], "evaluation_set": questions.hash}
    about |= {name: getattr(options, name) for name in ("temperature", "top_p", "seed")} | {"batch_size": B}
    about |= {"adapter": config.adapter, "device": config.device.partition(":")[0], "dtype": config.dtype}
    files = []
    for name in MODES if options.mode == "all" else [options.mode]:
        known = asked_in(name, questions)
        if has_mode(model, name, known):
            path = samples_file(config, name, options)
            files.append((name, known, path, read_samples(path, {"mode": name, **about})))
        elif options.mode == "all":
            print(f"left out: {config.method} cannot be sampled in the mode {name}", file=sys.stderr)
        else:
            raise UserError(f"--mode={name}: {config.method} cannot be sampled in it; take another, or all")
    for name, known, path, done in files:
        if len(done) >= options.n:
            print(f"{path}: {len(done)} samples are there")
            continue
        whole = done[: len(done) // B * B]
        with whole_file(path, "w", encoding="utf-8") as file:  # without what a kill left of a batch
            file.writelines(json.dumps(sample) + "\n" for sample in whole)
        for i in tqdm(range(len(whole), options.n, B), name, disable=None):
            seed = options.seed * 1_000_003 + i  # of this batch
            rows = [x[i : i + B] for x in (questions.tokens, known)]
            filled = generate(model, config, options, rows[0], *given_in(name, rows[1]), seed)
            log_p = log_p_of(model, config, name, filled, rows[1], seed)
            samples = [
                {"mode": name, **about, "i": i + j, "known": runs_of(k.tolist()), "log_p": p, "tokens": ids.tolist(),
                 "text": tokenizer.decode(ids.tolist())} for j, (ids, k, p) in enumerate(zip(filled, rows[1], log_p))
            ]  # fmt: skip
            try:
                with open(path, "a", encoding="utf-8") as file:
                    file.writelines(json.dumps(sample) + "\n" for sample in samples[: options.n - i])
            except OSError as e:
                raise UserError(f"cannot write {path} ({e.strerror}): make room and repeat the command") from None
        print(f"{path}: {options.n} samples", flush=True)


def samples_file(config, name, options):
    """samples_<mode>.jsonl in the run's folder; what is not the paper's is a part of the name."""
    usual = {"temperature": 0.8, "top_p": 0.95, "seed": 1}
    tag = "".join(f"_{key}{getattr(options, key)}" for key in usual if getattr(options, key) != usual[key])
    return Path(config.out_dir) / f"samples_{name}{tag}.jsonl"


# ---------------------------------------------------------------- the command


@dataclass
class Options:
    text: str | None = key(None, "text with marks: ____8, ____, [[words]]")
    file: str | None = key(None, "file with such a text; -: standard input")
    prompt: str | None = key(None, "text to be continued")
    n: int = key(1, "how many samples, or of marked text how many of the best", low=1)
    tries: int = key(8, "marked text: how many fillings of each length are drawn", low=1)
    lengths: str = key("1-12", "marked text: lengths of a blank without one, in tokens")
    candidates: str | None = key(None, "fillings of the one mark to be ranked, with | between them")
    json: bool = key(False, "marked text: print JSON, one object a line")
    max_new_tokens: int | None = key(None, "--prompt: how many tokens follow; None: up to 200", low=1)
    protocol: str | None = key(
        None, "write samples of the validation questions into the run's folder", choices=("paper",)
    )
    mode: str = key("all", "--protocol: which mode", choices=("all", *MODES))
    temperature: float = key(0.8, "below 1: safer; 0: always the likeliest token", low=0, high=100)
    top_p: float = key(0.95, "draw from the likeliest tokens that make up this probability", low=0, high=1)
    seed: int = key(1, "seed of the draws", low=0, high=2**32 - 1)
    checkpoint: str = key("best.pt", "which checkpoint of the run; ckpt.pt is the latest")


DRAWS = ("n", "temperature", "top_p", "seed", "checkpoint")
MARKS = (*DRAWS, "tries", "lengths", "candidates", "json")
TAKES = {
    "text": MARKS,
    "file": MARKS,
    "prompt": (*DRAWS, "max_new_tokens"),
    "protocol": (*DRAWS, "mode"),
    None: DRAWS,
}


def main(argv):
    paths, given, options = parse(argv, Options, __doc__)
    if len(paths) != 1:
        raise UserError("name one config file or run folder (and put text in quotes): python sample.py configs/tiny.py")
    asked = task_of(options, TAKES)
    model, config, state = open_run(paths[0], given, options.checkpoint)
    tokenizer = get_tokenizer(config.tokenizer)
    if asked == "protocol":
        return protocol(model, config, options, tokenizer, state)
    if asked == "prompt":
        continue_text(model, config, options, tokenizer)
    elif asked:
        fill(model, config, options, tokenizer)
    else:
        show_modes(model, config, options, tokenizer)
    print(f"({state['path']}, step {state['iter']})", file=sys.stderr)


if __name__ == "__main__":
    run(main)

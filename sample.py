"""Fill in blanks, continue a text, or show what the five modes generate.

    python sample.py configs/tiny.py                                         one validation text in each mode
    python sample.py configs/tiny.py --text "We the ____8 of the United States" --n=3
    python sample.py configs/tiny.py --prompt "Fellow citizens" --max_new_tokens=100

A blank is four underscores and its length in tokens, all digits that follow; a text may have several, anywhere. All
that is not blank is known, the spaces around a blank too; only where a tokenizer joins spaces to the words after them (GPT-2's), the one space in
front of a blank is dropped, since the first token of the filling brings its own.
Generated parts are printed as [[..]]. It trains and scores nothing.
"""

import itertools
import sys
from dataclasses import dataclass

import torch

from checkpoint import autocast, open_run
from conditioning import MODES
from config import UserError, key, parse, run
from evaluate import check_length, encode_marked, evaluation_set
from prepare_data import encode, get_tokenizer

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


def show(tokenizer, ids, known):
    """Text in which the generated parts stand in [[..]]."""
    runs = itertools.groupby(zip(ids.tolist(), known.tolist()), lambda pair: pair[1])
    texts = ((tokenizer.decode([i for i, _ in pairs]), is_known) for is_known, pairs in runs)
    return "".join(text if is_known else f"[[{text}]]" for text, is_known in texts)


def generate(model, config, options, tokens, cond, forced=None):
    """model.generate for options.n copies of one question, each of shape (T,) -> (n, T) on the CPU.

    Each method decodes in its own way; but sigma-GPT takes what is forced from left to right.
    """
    copies = [None if x is None else x.expand(options.n, -1) for x in (tokens, cond, forced)]
    pick = sampler(config.device, options.temperature, options.top_p, options.seed)
    with autocast(config):  # orders and masks come from another stream than the tokens do
        generator = torch.Generator().manual_seed(options.seed ^ 1) if forced is None or model.bound else None
        return model.generate(copies[0], copies[1], pick, generator, copies[2]).cpu()


def fill(model, config, options, tokenizer):
    """Print --text with its blanks filled."""

    def unknown(blank):
        n = int(blank[1] or 0)
        if not n:
            raise UserError(f"--text: the blank {blank[0]!r} needs a length in tokens of at least 1, like ____8")
        check_length("--text", n, config)
        return [0] * n

    ids, known = encode_marked(tokenizer, options.text, r"____(\d*)", unknown)
    if all(known):
        raise UserError(f"--text: there is no blank in {options.text[:40]!r}: write one as ____8, 8 tokens long")
    check_length("--text", len(ids), config)
    tokens, cond = torch.tensor(ids), torch.tensor(known)
    if not model.can_condition_on(cond[None]):
        print(f"note: {config.method} fills a blank from what stands before it alone", file=sys.stderr)
    for row in generate(model, config, options, tokens, cond):
        print(show(tokenizer, row, cond))


def continue_text(model, config, options, tokenizer):
    """Print --prompt and what follows it. The prompt is forced in the body, x_c is empty."""
    ids = encode(tokenizer, options.prompt)
    n = options.max_new_tokens or min(200, config.block_size - len(ids))
    check_length("--prompt and --max_new_tokens", len(ids) + max(n, 1), config)
    tokens = torch.tensor(ids + [0] * n)
    forced = torch.arange(len(tokens)) < len(ids)
    for row in generate(model, config, options, tokens, torch.zeros_like(forced), forced):
        print(show(tokenizer, row, forced))


def show_modes(model, config, options, tokenizer):
    """Print the first validation question, answered in each mode."""
    questions = evaluation_set(config, "val")
    tokens = questions.tokens[0]
    prompt = torch.arange(len(tokens)) < PROMPT
    for name, mode in MODES.items():
        known = questions.cond[mode.law][0] if mode.law else prompt
        cond = known if mode.future else torch.zeros_like(known)
        if not model.can_condition_on(cond[None]) or (model.bound and mode.law and not mode.future):
            continue
        for row in generate(model, config, options, tokens, cond, None if mode.future else known):
            print(f"--- {name.replace('_', ' ')}\n{show(tokenizer, row, known)}\n", flush=True)


@dataclass
class Options:
    text: str | None = key(None, "text with blanks like ____8 to be filled")
    prompt: str | None = key(None, "text to be continued")
    n: int = key(1, "how many samples", low=1)
    max_new_tokens: int | None = key(None, "--prompt: how many tokens follow; None: up to 200", low=1)
    temperature: float = key(0.8, "below 1: safer; 0: always the likeliest token", low=0, high=100)
    top_p: float = key(0.95, "draw from the likeliest tokens that make up this probability", low=0, high=1)
    seed: int = key(1, "seed of the draws", low=0, high=2**32 - 1)
    checkpoint: str = key("best.pt", "which checkpoint of the run; ckpt.pt is the latest")


def main(argv):
    paths, given, options = parse(argv, Options, __doc__)
    if len(paths) != 1:
        raise UserError("name one config file or run folder (and put text in quotes): python sample.py configs/tiny.py")
    if options.text is not None and options.prompt is not None:
        raise UserError("--text fills blanks, --prompt is continued: give one of them")
    model, config, state = open_run(paths[0], given, options.checkpoint)
    tokenizer = get_tokenizer(config.tokenizer)
    if options.text is not None:
        fill(model, config, options, tokenizer)
    elif options.prompt is not None:
        continue_text(model, config, options, tokenizer)
    else:
        show_modes(model, config, options, tokenizer)
    print(f"({state['path']}, step {state['iter']})", file=sys.stderr)


if __name__ == "__main__":
    run(main)

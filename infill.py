"""Fill blanks so that both sides fit, rewrite words, rank given fillings: what `sample.py --text` does.

    ____12      a blank of exactly 12 tokens
    ____        a blank of any length in --lengths
    [[words]]   to be rewritten, in as many tokens as they have

Candidates are drawn given all the rest and ranked by log p(prefix + filling + suffix) with nothing known: as texts, so that this is the
posterior over fillings of whatever length. log p(filling | both sides, length) answers another question for each length, so those
cannot be compared; and dividing by the length would favour long predictable text.
This file draws nothing itself: it is given a function that does.
"""

import itertools
import re
import sys
from dataclasses import dataclass

import torch

from config import UserError
from evaluate import encode_marked, nll_of, seeded
from prepare_data import encode

MARK = r"(?s)_{4,}(\d*)|\[\[((?:(?!\[\[|\]\]).)+)\]\]"


@dataclass
class Candidate:
    """A text with its marks filled."""

    ids: list
    known: list
    sizes: list  # how many tokens stand at each mark
    log_p: float | None = None  # of the text, in nats, with nothing known; None: it cannot be ranked


class Marked:
    """A text with marks. `places`: of each, how many tokens go there; None: any number; words: as many as these have."""

    def __init__(self, tokenizer, text, block_size):
        self.tokenizer, self.text, self.marks = tokenizer, text, list(re.finditer(MARK, text))
        if re.search(r"\[\[|\]\]", re.sub(MARK, "", text)):
            raise UserError(
                f"--text: the marks in {text[:40]!r} do not pair: write [[words]], not empty and not nested"
            )
        if not self.marks:
            raise UserError(f"--text: there is no blank in {text[:40]!r}: write ____8 (8 tokens), ____ or [[words]]")
        self.places = [mark[2] or (int(mark[1][:10]) if mark[1] else None) for mark in self.marks]
        for mark, place in zip(self.marks, self.places):
            if isinstance(place, int) and not 1 <= place <= block_size:
                fix = f"needs a length of 1 .. {block_size} tokens (block_size), like ____8"
                raise UserError(f"--text: the blank {mark[0][:40]!r} {fix}")
            if "____" in (mark[2] or ""):
                raise UserError(f"--text: marks overlap in {mark[0]!r}: either a blank or words to be rewritten")
        free = [mark for mark, place in zip(self.marks, self.places) if place is None]
        if any(not text[a.end() : b.start()].strip() for a, b in itertools.pairwise(free)):
            raise UserError("--text: nothing stands between two blanks of free length: give lengths, like ____8")

    def encode(self, places, end=None):
        """Of the text up to character `end`: ids, known, sizes. At a mark stand its words, or as many zeros as its length says."""
        rest, sizes, text = iter(places), [], self.text[:end]
        if end is not None and self.tokenizer.words_carry_their_space:
            text = text.removesuffix(" ")  # it would belong to what comes next

        def ids_of(mark, carried):
            place = next(rest)
            ids = [0] * place if isinstance(place, int) else encode(self.tokenizer, carried + place)
            sizes.append(len(ids))
            return ids

        return *encode_marked(self.tokenizer, text, MARK, ids_of), sizes


def window(known, T):
    """How many tokens at the left and at the right are too many for a model of T, with the unknown ones in the middle."""
    a, b = known.index(False), len(known) - known[::-1].index(False)
    if b - a > T:
        fix = "shorten the blanks, what is between them, or --lengths"
        raise UserError(
            f"--text: from the first blank to the end of the last are {b - a} tokens, block_size is {T}: {fix}"
        )
    left = max(0, min((a + b - T) // 2, len(known) - T))
    return left, max(0, len(known) - T - left)


def log_p(model, config, rows):
    """Of texts (n, L), with nothing known: [n] in nats, by the reading in which the method is at home; None of a mere bound."""
    if model.bound:
        return [None] * len(rows)
    nothing, (_, draws) = torch.zeros_like(rows, dtype=torch.bool), model.readings[-1]
    nll = [nll_of(model, config, rows, nothing, "ranking", generator).sum(1) for generator in seeded(config, draws)]
    return (-sum(nll) / len(nll)).tolist()


def candidates(model, config, marked, choices, draw, end=None):
    """Fill the text up to character `end` in each of these ways, `choices`, a list of places -> [Candidate], best first.

    draw: ids (L,), known (L,) -> filled copies (n, L). Without it the places hold the words.
    """
    questions, found = [marked.encode(places, end) for places in choices], []
    left, right = window(max((known for _, known, _ in questions), key=len), config.block_size)
    if left + right and end is None:
        print(f"note: the text is longer than block_size = {config.block_size}: {left} tokens at its start and {right} "
              "at its end are not looked at", file=sys.stderr)  # fmt: skip
    for ids, known, sizes in questions:
        inside = slice(left, len(ids) - right)
        rows = torch.tensor([ids[inside]])
        if draw:
            rows = draw(rows[0], torch.tensor(known[inside]))
        rows = rows if model.bound else torch.tensor(list(dict.fromkeys(map(tuple, rows.tolist()))))
        found += [
            Candidate(ids[:left] + row + ids[len(ids) - right :], known, sizes, p)
            for row, p in zip(rows.tolist(), log_p(model, config, rows))
        ]
    return found if model.bound else sorted(found, key=lambda c: -c.log_p)


def fill(model, config, marked, lengths, draw):
    """Fill all marks -> [Candidate], best first.

    All blanks are filled together, from left to right. Where several are free, their lengths are settled one after another, each by
    the best text up to the next free one.
    """
    places = list(marked.places)
    free = [i for i, place in enumerate(places) if place is None]
    if free and model.bound:
        raise UserError(f"--text: {config.method} has no log p by which to rank lengths: give them, like ____8")
    if free and not marked.text[marked.marks[free[-1]].end() :].strip():
        print("note: nothing follows the last blank, so the shortest filling wins: give it a length", file=sys.stderr)
    for i, following in itertools.pairwise([*free, None]):
        choices = [[*places[:i], n, *places[i + 1 :]][:following] for n in lengths]
        end = None if following is None else marked.marks[following].start()
        found = candidates(model, config, marked, choices, draw, end)
        places[i] = found[0].sizes[i]
    if not free:
        found = candidates(model, config, marked, [places], draw)
    if all(isinstance(place, str) for place in places):  # nothing but words to rewrite: as they were is no answer
        found = [c for c in found if marked.tokenizer.decode(c.ids) != re.sub(MARK, lambda mark: mark[2], marked.text)]
        if not found:
            raise UserError("--text: all that was drawn are the words as they were: raise --temperature or --tries")
    return found


def rank_given(model, config, marked, words):
    """Put each of the given words into the one mark -> [Candidate], best first."""
    if len(marked.marks) != 1:
        raise UserError(f"--candidates: the text has {len(marked.marks)} marks: it must have one")
    if not all(words):
        raise UserError(f"--candidates: {'|'.join(words)!r} has an empty one: it has no tokens; leave it out")
    if model.bound:
        raise UserError(f"--candidates: {config.method} has no log p, only a bound: take a run of another method")
    return candidates(model, config, marked, [[word] for word in words], None)

"""Two languages of our own, for COrAL: tasks whose answers are right or wrong. prepare_data.py writes them as bytes.

    reverse   64 letters, then the same from the last to the first. Nothing to think about: how many tokens does a call yield?
    carry     24 columns, then 24 digits. A column is a digit 0 .. 9, which is added to the digit of the answer on its right, modulo 10,
              or a letter A .. J, which stands for the same digits and begins a new sum: nothing is carried into it.

        columns   5 3 9 A 4 J      from the right: J is 9; 4 + 9 = 3; A is 0, whatever comes before it; 9 + 0; 3 + 9 = 2; 5 + 2 = 7
        digits    7 2 9 0 3 9      from the left: 7 comes first, and takes all columns up to A

So a draft from the left goes wrong where many columns have to be looked through, and a digit and the one on its right tell what is wrong.

Each is a document: a prompt of PROMPT tokens, the answer, and the separator, which ends it. This file knows no model.
"""

import numpy as np

SIGNS = "0123456789ABCDEFGHIJ"
# Share of letters. Settled before any training of COrAL on this task, by stage 0 alone, as configs/coral_carry.py trains it (seed 1337): it
# answers 197 of 300 validation questions right (66%). (At 0.7, another 1,000 steps: 25%; at 0.3 none.)
P_LETTER = 0.85
PROMPT = {"reverse": 64, "carry": 24}


def sums(columns):
    """Columns (n, k) of 0 .. 19, letters from 10 on -> the digits of the answer, (n, k)."""
    digits, carried = np.zeros_like(columns), 0
    for i in reversed(range(columns.shape[1])):
        digits[:, i] = carried = (columns[:, i] + np.where(columns[:, i] < 10, carried, 0)) % 10
    return digits


def carry(n, rng):
    columns = rng.integers(0, 10, (n, PROMPT["carry"]))
    columns += 10 * (rng.random(columns.shape) < P_LETTER)
    return columns, sums(columns)


def reverse(n, rng):
    letters = rng.integers(0, 26, (n, PROMPT["reverse"]))
    return letters, letters[:, ::-1]


def documents(name, n, seed):
    """n documents of a task, drawn from `seed`."""
    task, signs = {"carry": (carry, SIGNS), "reverse": (reverse, "abcdefghijklmnopqrstuvwxyz")}[name]
    rows = np.concatenate(task(n, np.random.default_rng(seed)), 1)
    return ["".join(signs[i] for i in row) for row in rows]


def source(name):
    """What prepare_data.py calls a source."""

    def splits(options, state):
        sizes = {"train": 200_000, "val": 2_000, "test": 2_000}
        yield {split: documents(name, n, seed) for seed, (split, n) in enumerate(sizes.items())}, None

    return splits

"""Two languages of our own, for COrAL: tasks whose answers are right or wrong. prepare_data.py writes them as bytes.

    reverse   64 letters, then the same from the last to the first. Nothing to think about: how many tokens does a call yield?
    carry     24 column sums of an addition, one sign each (0 .. 9, A .. I), then the 25 digits of the result.

        columns   5 9 9 A 0      the rightmost column carries nothing, A = 10 carries 1 into 9, that one into 9, ...
        digits  0 6 0 0 0 0      most significant first: from left to right, 6 needs to know all of the columns up to A;
                                 from right to left, a digit and its column tell what was carried into the next one

Each is a document: a prompt of PROMPT tokens, the answer, and the separator, which ends it. This file knows no model.
"""

import numpy as np

SIGNS = "0123456789ABCDEFGHI"
# Share of nines, which pass a carry on. Settled before any training of COrAL, by stage 0 alone (seed 1337, 300 validation questions):
# after the 400 steps of configs/coral_carry.py it answers 70% right. At 0.7, or after 2,000 steps, nothing would be left to refine
# (after 1,000 steps at 0.9: 98%; after 500 at 0.8, or 2,000 at 0.7: all of them).
# But it does leave nothing: on the test questions stage 0 is right on 78%, and after stage 2b, or 1,600 steps of the next token alone,
# the next token is right on all of them.
P_NINE = 0.9
PROMPT = {"reverse": 64, "carry": 24}


def add_up(columns):
    """Column sums (n, k) of 0 .. 18, most significant first -> the digits of the sum they stand for, (n, k + 1)."""
    digits, carry = np.zeros((len(columns), columns.shape[1] + 1), np.int64), np.zeros(len(columns), np.int64)
    for i in reversed(range(columns.shape[1])):
        carry, digits[:, i + 1] = np.divmod(columns[:, i] + carry, 10)
    digits[:, 0] = carry
    return digits


def carry(n, rng):
    columns = rng.integers(0, 18, (n, PROMPT["carry"]))
    columns += columns >= 9  # uniform on all but 9
    columns[rng.random(columns.shape) < P_NINE] = 9
    return columns, add_up(columns)


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

"""Two languages of our own, for COrAL: tasks whose answers are right or wrong. prepare_data.py writes them as bytes.

    reverse   64 letters, then the same from the last to the first. Nothing to think about: how many tokens does a call yield?
    product   four times four digits. The answer has three digits for each four: their two sums, and before these the product of the sums,
              of all of them the last digit. So it states its result before its working.

        digits    3 9 4 2    3 + 9 = 12, 4 + 2 = 6, 2 * 6 = 12
        answer    2 2 6      from the left: 2 takes two sums and a product at once; once 2 6 is there, a product of two digits

Each is a document: a prompt of PROMPT tokens, the answer, and the separator, which ends it. This file knows no model.
"""

import numpy as np

PROMPT = {"reverse": 64, "product": 16}


def product(n, rng):
    digits = rng.integers(0, 10, (n, PROMPT["product"]))
    sums = digits.reshape(n, -1, 2, 2).sum(-1) % 10
    answer = np.concatenate([sums.prod(-1, keepdims=True) % 10, sums], -1)
    return digits, answer.reshape(n, -1)


def reverse(n, rng):
    letters = rng.integers(0, 26, (n, PROMPT["reverse"]))
    return letters, letters[:, ::-1]


def documents(name, n, seed):
    """n documents of a task, drawn from `seed`."""
    task, signs = {"product": (product, "0123456789"), "reverse": (reverse, "abcdefghijklmnopqrstuvwxyz")}[name]
    rows = np.concatenate(task(n, np.random.default_rng(seed)), 1)
    return ["".join(signs[i] for i in row) for row in rows]


def source(name):
    """What prepare_data.py calls a source."""

    def splits(options, state):
        sizes = {"train": 200_000, "val": 2_000, "test": 2_000}
        yield {split: documents(name, n, seed) for seed, (split, n) in enumerate(sizes.items())}, None

    return splits

"""The laws of x_c against enumeration and against a simulation written from the paper's four steps, token by token."""

import itertools
import math
import random
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from conditioning import augment, draw_cond, draw_evaluation_set, infilling_law, training_law
from config import Config


def law_config(T, **keys):
    return Config(block_size=T, **keys)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def assert_frequencies(counts, probabilities, n):
    """Every observed count lies within five standard deviations of its expectation, and nothing else occurs."""
    assert set(counts) <= set(probabilities), set(counts) - set(probabilities)
    for outcome, p in probabilities.items():
        deviation = abs(counts[outcome] - n * p) / math.sqrt(n * p * (1 - p) + 1e-9)
        assert deviation < 5, f"{outcome}: {counts[outcome]} of {n}, expected {n * p:.0f}"


def runs(row):
    return sum(a and not b for a, b in zip(row, [False, *row]))


def simulate(T, r_min, r_max, b_min, b_max, rng):
    """Steps 1 to 4 of Section 3 for one sequence; gaps as in the paper: B values out of 1 .. B + |x_e|."""
    size = rng.randint(*(min(math.floor(r * T + 1e-9), T - 1) for r in (r_min, r_max)))
    B = rng.randint(min(b_min, size), min(b_max, size))
    sizes = [1] * B
    for _ in range(size - B):
        sizes[rng.randrange(B)] += 1
    places = sorted(rng.sample(range(1, B + T - size + 1), B))
    row, last = [], 0
    for place, block in zip(places, sizes):
        row += [False] * (place - last - 1) + [True] * block
        last = place
    return row + [False] * (T - len(row))


def test_full_coverage():
    """r_min = 0, r_max = 1, B = |x_c|: every size equally likely, and every set of a size (paper, end of Section 3)."""
    T, n = 6, 200_000
    cond = training_law(law_config(T, r_max=1.0, b_min=T, b_max=T), n, generator())
    counts = Counter(map(tuple, cond.tolist()))
    probabilities = {
        known: 1 / T / math.comb(T, sum(known))
        for known in itertools.product((False, True), repeat=T)
        if sum(known) < T
    }
    assert_frequencies(counts, probabilities, n)


@pytest.mark.parametrize(
    "keys", [{}, {"r_min": 0.3, "r_max": 1.0}, {"b_max": 3}, {"b_min": 2, "b_max": 4, "r_max": 0.9}]
)
def test_training_law_is_the_simulated_one(keys):
    T, n = 13, 60_000
    config = law_config(T, **keys)
    rng = random.Random(0)
    expected = [simulate(T, config.r_min, config.r_max, config.b_min, config.b_max or T, rng) for _ in range(n)]
    drawn = training_law(config, n, generator()).tolist()
    for statistic in (
        lambda row: (sum(row), runs(row)),
        lambda row: row[0],
        lambda row: row[-1],
        lambda row: (row[0], row[5]),
    ):
        a, b = Counter(map(statistic, drawn)), Counter(map(statistic, expected))
        for outcome in a | b:
            assert abs(a[outcome] - b[outcome]) < 5 * math.sqrt(a[outcome] + b[outcome]) + 1, (
                outcome,
                a[outcome],
                b[outcome],
            )


def test_first_token_is_seldom_known():
    """At r_max = 0.6 about 0.18; a sampler that cuts blocks to free segments gives about 0.6 (METHODS: the trap)."""
    cond = training_law(law_config(256), 20_000, generator())
    assert abs(cond[:, 0].double().mean() - 0.18) < 0.02
    assert abs(cond.sum(1).double().mean() - 76.5) < 1


def test_infilling_law():
    T, n = 10, 100_000
    config = law_config(T, r_min=0.5, r_max=0.5)
    counts = Counter(map(tuple, infilling_law(config, n, generator()).tolist()))
    edges = [0.2, 1.5 / 5, 2.5 / 5, 3.5 / 5, 0.8]  # round(5 f) changes at these f
    probabilities = {}
    for left, low, high in zip((1, 2, 3, 4), edges, edges[1:]):
        probabilities[tuple([True] * left + [False] * 5 + [True] * (5 - left))] = (high - low) / 0.6
    assert_frequencies(counts, probabilities, n)


SHARE = st.floats(0, 1, allow_subnormal=False)  # fast.py flushes those


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 40), SHARE, SHARE, st.integers(1, 50), st.integers(1, 50), st.integers(0, 99))
def test_any_parameters(T, r1, r2, b1, b2, seed):
    config = law_config(T, r_min=min(r1, r2), r_max=max(r1, r2), b_min=min(b1, b2), b_max=max(b1, b2))
    for law in (training_law, infilling_law):
        cond = law(config, 16, generator(seed))
        size = cond.sum(1)
        assert cond.shape == (16, T) and cond.dtype == torch.bool
        low, high = (min(math.floor(r * T + 1e-9), T - 1) for r in (config.r_min, config.r_max))
        assert ((size >= low) & (size <= high)).all()
        assert torch.equal(cond, law(config, 16, generator(seed))), "the same seed gives the same sets"
    assert all(runs(row) <= min(config.b_max, sum(row)) for row in training_law(config, 16, generator(seed)).tolist())


def test_everything_known_but_one():
    assert (training_law(law_config(8, r_min=1.0, r_max=1.0), 100, generator()).sum(1) == 7).all()


def test_mix_empties_a_share():
    config = law_config(20, r_min=0.5, r_max=0.5, mix=0.3)
    empty = (draw_cond(config, 20_000, generator()).sum(1) == 0).double().mean()
    assert abs(empty - 0.3) < 0.02
    again = [draw_cond(config, 500, generator(1)) for _ in range(2)]
    assert torch.equal(*again), "nothing is drawn from the global generator"


def test_augment_by_hand():
    tokens = torch.tensor([[11, 12, 13, 14], [21, 22, 23, 24]])
    cond = torch.tensor([[False, True, False, True], [False, False, True, False]])
    out, positions, present = augment(tokens, cond, bos=99)
    assert out.tolist() == [[12, 14, 99, 11, 12, 13], [23, 99, 99, 21, 22, 23]]
    assert positions.tolist() == [[2, 4, 0, 1, 2, 3], [3, 0, 0, 1, 2, 3]]
    assert present.tolist() == [[True] * 6, [True, False] + [True] * 4]


def test_evaluation_set():
    chunks = np.arange(40).reshape(10, 4)
    config = law_config(4, eval_sequences=6)
    a = draw_evaluation_set(chunks, config)
    assert (
        len(a.tokens) == 6
        and a.hash == draw_evaluation_set(chunks, law_config(4, eval_sequences=6, seed=5, mix=0.5)).hash
    )
    assert a.hash != draw_evaluation_set(chunks, law_config(4, eval_sequences=6, eval_seed=1)).hash
    assert a.hash != draw_evaluation_set(chunks, law_config(4, eval_sequences=6, r_max=1.0)).hash
    assert a.hash != draw_evaluation_set(chunks + 1, config).hash
    everything = draw_evaluation_set(chunks, law_config(4)).tokens
    assert everything[:, 0].tolist() != chunks[:, 0].tolist(), "in random order, so that the first n are a fair sample"
    assert sorted(everything[:, 0].tolist()) == chunks[:, 0].tolist() and torch.equal(everything[:6], a.tokens)

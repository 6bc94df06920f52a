"""Conditioning sets: which tokens are known (x_c), and how a sequence looks once they are copied to its front.

This file reads like Section 3 of the paper: draw x_c, put its copies in front, and the five evaluation modes. It knows
nothing of networks, tokenizers or files. To see it at work:

    python test_masks.py --show

Names: B sequences of T body tokens x_1..x_T; `cond` is (B, T) bool, True = known = in x_c; the rest is x_e.
"""

import hashlib
from dataclasses import dataclass

import torch

# ---------------------------------------------------------------- the laws of x_c


def draw_sizes(config, n, generator, T):
    """|x_c| for n sequences: (n,) int64, uniform on r_min T .. r_max T, with at least one token left to predict."""
    low, high = (min(int(r * T + 1e-9), T - 1) for r in (config.r_min, config.r_max))  # 1e-9: 0.29 * 100 is 28.99..
    return torch.randint(low, high + 1, (n,), generator=generator)


def training_law(config, n, generator, T=None):
    """Blocks of known tokens in random places (paper, Section 3, steps 1 to 4). Returns cond (n, T) bool, T = block_size unless given.

    Step 4 as a picture, for T = 9, |x_c| = 5, B = 2 blocks of sizes 3 and 2, so |x_e| = 4:

        B + |x_e| = 6 items, choose 2 of them   . # . . # .
        unroll the chosen ones to blocks        . ### . . ## .
    """
    T = config.block_size if T is None else T
    size = draw_sizes(config, n, generator, T)[:, None]
    b_max = T if config.b_max is None else config.b_max
    low, high = size.clamp(max=config.b_min), size.clamp(max=b_max)
    n_blocks = low + uniform_int(high - low + 1, (n, 1), generator)  # 0 where x_c is empty
    column = torch.arange(T)

    # Step 3: every block holds one token; each of the |x_c| - B others joins a block drawn uniformly.
    joined = uniform_int(n_blocks, (n, T), generator)  # (n, T), of which the first |x_c| - B of each row count
    sizes = (column < n_blocks).long().scatter_add(1, joined, (column < size - n_blocks).long())  # (n, T), the first B

    # Step 4: choose B of the B + |x_e| items without replacement, by ranking random keys; the other slots are void.
    n_items = n_blocks + T - size
    keys = torch.rand(n, T, generator=generator, dtype=torch.float64).masked_fill(column >= n_items, 2.0)  # void: last
    chosen = torch.zeros(n, T, dtype=torch.bool).scatter(1, keys.argsort(1), column < n_blocks)
    block = (chosen.cumsum(1) - 1).clamp(min=0)
    length = torch.where(chosen, sizes.gather(1, block), (column < n_items).long())  # each row sums to T
    return chosen.flatten().repeat_interleave(length.flatten()).view(n, T)


def infilling_law(config, n, generator):
    """Two known boundaries around an unknown middle (paper, Section 4.1). Returns cond (n, T) bool."""
    T = config.block_size
    size = draw_sizes(config, n, generator, T)
    fraction = 0.2 + 0.6 * torch.rand(n, generator=generator, dtype=torch.float64)
    left = (fraction * size).round().long()
    column = torch.arange(T)
    return (column < left[:, None]) | (column >= (T - size + left)[:, None])


def uniform_int(bound, shape, generator):
    """Integers uniform on 0 .. bound - 1 (0 where bound is 0), of the given shape, for a tensor of bounds."""
    return (torch.rand(shape, generator=generator, dtype=torch.float64) * bound).long()


def prompt_law(config, n, generator):
    """The first `prompt_length` tokens are known, and blocks of the rest. Returns cond (n, T) bool."""
    P = config.prompt_length
    rest = training_law(config, n, generator, config.block_size - P)
    return torch.cat([torch.ones(n, P, dtype=torch.bool), rest], 1)


# a law of your own: a function above, a name here
LAWS = {"training": training_law, "infilling": infilling_law, "prompt": prompt_law}


def draw_cond(config, n, generator):
    """The x_c of n training sequences: config.law, of which a share `config.mix` is emptied (pure GPT sequences)."""
    cond = LAWS[config.law](config, n, generator)
    assert cond.shape == (n, config.block_size) and cond.dtype == torch.bool, (
        f"{config.law}: {cond.shape}, {cond.dtype}"
    )
    assert not cond.all(1).any(), f"the law {config.law!r} leaves no token to predict"
    return cond & (torch.rand(n, 1, generator=generator) >= config.mix)


# ---------------------------------------------------------------- the augmented sequence


def augment(tokens, cond, bos):
    """Put copies of the known tokens in front of the sequence, at their original positions (paper, Section 3).

    tokens (B, T) int, cond (B, T) bool -> tokens (B, L), positions (B, L), present (B, L) bool, with L = P + T:

        [ copies of x_c, by position | padding up to P | BOS | x_1 .. x_{T-1} ]         P = the largest |x_c|

    BOS stands at position 0 and x_i at i. The row of x_{i-1} predicts x_i (BOS predicts x_1), so the last T rows predict
    x_1 .. x_T; x_T itself has no slot, since nothing would be predicted from it and nobody could see it. `present` is
    False in the padding.
    """
    B, T = tokens.shape
    n_copies = cond.sum(1, keepdim=True)
    P, place = int(n_copies.max()), torch.arange(T, device=tokens.device)
    known_first = cond.int().argsort(dim=1, descending=True, stable=True)[:, :P]
    is_copy = place[:P] < n_copies
    copies = tokens.gather(1, known_first).masked_fill(~is_copy, bos)
    positions = torch.cat([(known_first + 1) * is_copy, place.expand(B, T)], 1)
    present = torch.cat([is_copy, torch.ones_like(cond)], 1)
    return torch.cat([copies, tokens.new_full((B, 1), bos), tokens[:, :-1]], 1), positions, present


# ---------------------------------------------------------------- the five modes


@dataclass(frozen=True)
class Mode:
    """What a model may know, and what it is scored on (paper, Section 4.1). `law` None: nothing known, all scored."""

    law: str | None
    future: bool  # False: the same tokens are scored, but each given only those before it


MODES = {
    "unconditional": Mode(None, False),
    "infilling": Mode("infilling", True),
    "training": Mode("training", True),
    "infilling_no_future": Mode("infilling", False),
    "training_no_future": Mode("training", False),
}


def modes_with(law):
    """The five modes, and the two of a law of your own."""
    return MODES | {law: Mode(law, True), f"{law}_no_future": Mode(law, False)}


@dataclass
class EvaluationSet:
    """The questions: `tokens` (n, T) int64 and, for each law, which of them are known, `cond[law]` (n, T) bool."""

    tokens: torch.Tensor
    cond: dict

    @property
    def hash(self):
        """Hex digest of what the five modes ask: two figures may be compared only if it is the same for both."""
        digest = hashlib.sha256(self.tokens.numpy().tobytes())
        for law in sorted({mode.law for mode in MODES.values() if mode.law}):
            digest.update(self.cond[law].numpy().tobytes())
        return digest.hexdigest()[:16]


def draw_evaluation_set(chunks, config):
    """Draw the questions from `chunks`, a numpy array (N, T).

    They depend on the data, T, n, the law's parameters and eval_seed only. The chunks come in random order, so that the first m of n questions are a fair sample too.
    """
    generator = torch.Generator().manual_seed(config.eval_seed)
    n = min(len(chunks), config.eval_sequences or len(chunks))
    chosen = torch.randperm(len(chunks), generator=generator)[:n]
    tokens = torch.tensor(chunks[chosen.numpy()].astype("int64"))
    # Each law has a generator of its own, so that a new law leaves the questions of the old ones as they are.
    laws = {mode.law for mode in modes_with(config.law).values() if mode.law}
    cond = {name: LAWS[name](config, n, torch.Generator().manual_seed(config.eval_seed)) for name in sorted(laws)}
    return EvaluationSet(tokens, cond)

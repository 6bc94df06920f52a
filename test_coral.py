"""COrAL's exact facts: target-aware positions, the pairs of its losses, the law of its noise, and its decoder against stubs.

Models are tiny with large weights, in float64; a stub answers `log_p` where only the decoder is tested.
"""

import dataclasses
import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import coral_runs
import evaluate
import tasks
import train
from checkpoint import load, open_run
from config import UserError, load_config, parse
from coral import (
    STAGES,
    Coral,
    Decoder,
    TargetAware,
    acceptance,
    candidates,
    corrupt,
    decode,
    pairs_of,
    predict,
    tree,
    upto_end,
    verification,
    verify,
    weight,
)
from model import Transformer

V, L, EOS = 6, 9, 5
PROMPT, SIZE = tasks.PROMPT["product"], load_config(["configs/coral_product.py"], {}).block_size
QUESTION = "3942" * (PROMPT // 4)


def weighty(stage="2b", **how):
    torch.manual_seed(0)
    model = Coral(TargetAware(V, 3, n_head=2, n_embd=16), bos=EOS, stage=stage, **how)
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(std=0.5)
    return model.double().eval()


def random_slots(n=3, length=L, seed=1):
    return torch.randint(V, (n, length), generator=torch.Generator().manual_seed(seed))


def every_slot(slots):
    return torch.arange(slots.size(1)).expand_as(slots)


def causal(n):
    return torch.ones(n, n, dtype=torch.bool).tril()


# ---------------------------------------------------------------- target-aware positions


def test_a_target_at_the_source_is_the_plain_layer():
    body, slots = weighty().body, random_slots()
    where = every_slot(slots)
    plain = Transformer.forward(body, slots, where, causal(L).expand(len(slots), -1, -1))
    assert torch.equal(body.pairs(slots, where, where), plain)


@pytest.mark.parametrize("d", [-8, -1, 1, 4])
def test_an_offset_turns_the_queries(d):
    """A plain layer whose W_q is R(d) W_q gives the same."""
    body, slots = weighty().body, random_slots()
    where = every_slot(slots)
    found = body.pairs(slots, where, where + d)
    attn, half = body.blocks[-1].attn, body.d // 2
    angle = d * 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    with torch.no_grad():
        for x in (attn.qkv.weight, attn.qkv.bias):
            q = x[:16].unflatten(0, (2, 2, half))  # heads, halves
            a, b = q[:, 0].clone(), q[:, 1].clone()
            cos, sin = (f(angle).view(1, half, *[1] * (x.dim() - 1)) for f in (torch.cos, torch.sin))
            q[:, 0], q[:, 1] = a * cos - b * sin, b * cos + a * sin
    plain = Transformer.forward(body, slots, where, causal(L).expand(len(slots), -1, -1))
    assert (found - plain).abs().max() < 1e-4  # angles are float32
    assert (found - Transformer.forward(weighty().body, slots, where, causal(L).expand(3, -1, -1))).abs().max() > 1e-2


def test_a_source_sees_what_is_before_it():
    """For every target: the same as on the slots up to the source alone, and no gradient from any later one."""
    model, slots = weighty(), random_slots(1)
    embedded = []
    model.body.wte.register_forward_hook(lambda module, x, y: embedded.append(y.requires_grad_()) or y)
    for m, mu in itertools.product(range(L), range(L + 4)):
        whole = model.body.pairs(slots, torch.tensor([[m]]), torch.tensor([[mu]]))
        (gradient,) = torch.autograd.grad(whole.sum(), embedded[-1])
        assert not gradient[0, m + 1 :].any() and gradient[0, : m + 1].any()
        short = model.body.pairs(slots[:, : m + 1], torch.tensor([[m]]), torch.tensor([[mu]]))
        assert (whole - short).abs().max() < 1e-12


def test_a_node_of_a_tree_is_its_path_in_a_line():
    model, y = weighty(), [EOS, 1, 2]
    tokens, parents = [3, 4, 0, 1, 2], [-1, 0, 1, 0, -1]  # 3-4-0, 3-1, 2
    slots, positions, allowed = tree(y, tokens, parents)
    for path in ([0, 1, 2], [0, 3], [4]):
        line = torch.tensor(y + [tokens[i] for i in path])
        for i, depth in zip(path, itertools.count(len(y))):
            tgt = torch.arange(len(y), len(y) + 5)
            in_tree = model.log_p(slots, torch.full_like(tgt, len(y) + i), tgt, positions, allowed)
            in_line = model.log_p(line, torch.full_like(tgt, depth), tgt)
            assert (in_tree - in_line).abs().max() < 1e-12


# ---------------------------------------------------------------- training


def test_pairs_are_all_there_are():
    targets = torch.rand(4, L, generator=torch.Generator().manual_seed(2)) < 0.4
    targets[2] = False
    src, tgt, real = pairs_of(targets, range(-3, 3))
    for b in range(4):
        found = [*zip(src[b][real[b]].tolist(), tgt[b][real[b]].tolist())]
        wanted = {(mu - d, mu) for mu in range(L) if targets[b, mu] for d in range(-3, 3) if 0 <= mu - d < L}
        assert set(found) == wanted and len(found) == len(wanted)


def test_unequal_prompts_are_spoilt_behind_them():
    """A row of its own prompt each, the last with less than a patch to answer."""
    slots = torch.arange(20).expand(400, -1)
    response = slots >= torch.tensor([3, 6, 11, 17]).repeat(100)[:, None]
    spoilt, where = corrupt(slots, response, 4, 0.3, torch.Generator().manual_seed(0))
    assert where.any(1).all() and not (where & ~response).any()
    assert torch.equal(spoilt[~where], slots[~where])
    assert response.gather(1, spoilt)[where].all()  # a slot holds its place, so it tells where it was taken
    assert (
        (
            (where.int().diff(dim=1) == 1).nonzero()[:, 1]
            + 1
            - (~response).sum(1)[(where.int().diff(dim=1) == 1).nonzero()[:, 0]]
        )
        .remainder(4)
        .eq(0)
        .all()
    )


def test_the_prompt_is_known(task):
    """The first P tokens, and blocks of the rest where r_max allows; another P asks other questions."""
    from conditioning import draw_cond

    config = load_config(["configs/coral_product.py"], {})
    assert torch.equal(draw_cond(config, 5, torch.Generator()), (torch.arange(SIZE) < PROMPT).expand(5, -1))
    config = dataclasses.replace(config, method="ac_gpt", r_max=0.6)
    cond = draw_cond(config, 500, torch.Generator().manual_seed(0))
    assert cond[:, :PROMPT].all() and 0.2 < cond[:, PROMPT:].double().mean() < 0.4
    paths, given, _ = parse(task)
    config = load_config(paths, given)
    other = dataclasses.replace(config, prompt_length=PROMPT + 5)
    assert evaluate.evaluation_set(config, "val").cond["prompt"].sum(1).eq(PROMPT).all()
    assert evaluate.evaluation_set(other, "val").cond["prompt"].sum(1).eq(PROMPT + 5).all()


def test_forward_terms_are_k_f_times_the_response():
    response = torch.arange(20).expand(3, -1) >= 4
    assert pairs_of(response, range(1, 5))[2].sum() == 3 * 16 * 4


def test_the_loss_is_that_of_a_plain_loop():
    model = weighty(granularity=2, ratio=0.5)
    tokens, cond = random_slots(3, 8), torch.arange(8) < torch.tensor([[1], [3], [5]])
    clean = model.slots(tokens)
    spoilt, where = corrupt(clean, F.pad(~cond, (1, 0)), 2, 0.5, torch.Generator().manual_seed(7))

    def mean(slots, targets, offsets):
        terms = [
            -model.log_p(slots[b], torch.tensor([mu - d]), torch.tensor([mu]))[0, clean[b, mu]].item()
            for b, mu in targets.nonzero().tolist()
            for d in offsets
            if 0 <= mu - d < 9
        ]
        return sum(terms) / len(terms)

    wanted = (mean(clean, F.pad(~cond, (1, 0)), range(1, 5)) + mean(spoilt, where, range(-8, 1))) / 2
    loss, n = model.training_loss(tokens, cond, torch.Generator().manual_seed(7))
    assert n == 15 and loss.item() / 15 == pytest.approx(wanted, rel=1e-9)
    sft = weighty("0")
    wanted = -torch.cat([sft.body.head(sft.body(clean, every_slot(clean), causal(9).expand(3, -1, -1)))]).log_softmax(
        -1
    )
    wanted = wanted[:, :-1].gather(2, tokens[..., None])[..., 0][~cond].mean().item()
    loss, n = sft.training_loss(tokens, cond)
    assert loss.item() / int(n) == pytest.approx(wanted, rel=1e-9)


def test_every_offset_gets_a_gradient():
    model, seen = weighty(), {}
    tokens, cond = random_slots(8, 16), torch.arange(16).expand(8, -1) < 5
    plain = model.body.pairs

    def record(slots, src, tgt, *more):
        hidden = plain(slots, src, tgt, *more)
        hidden.register_hook(
            lambda g: [seen.setdefault(d, []).append(g[tgt - src == d].abs().sum()) for d in range(-8, 5)] and None
        )
        return hidden

    model.body.pairs = record
    model.training_loss(tokens, cond, torch.Generator().manual_seed(0))[0].backward()
    assert set(seen) == set(range(-8, 5)) and all(sum(values) > 0 for values in seen.values())


@pytest.mark.parametrize("drawn", [False, True])
def test_noise(drawn):
    """The prompt stays, one patch at least is spoilt, what is not picked is clean, what is comes from the response, whole patches."""
    slots, response = torch.arange(30).expand(500, -1).clone(), torch.arange(30).expand(500, -1) >= 7
    spoilt, where = corrupt(slots, response, 4, 0.25, torch.Generator().manual_seed(0), drawn)
    assert not where[:, :7].any() and where.any(1).all()
    assert torch.equal(spoilt[~where], slots[~where]) and (spoilt[where] >= 7).all()
    if not drawn:
        for row, picked in zip(spoilt[:, 7:], where[:, 7:]):
            for patch, mask, first in zip(row.split(4), picked.split(4), range(7, 30, 4)):
                assert mask.all() or not mask.any()
                start = patch[0].item()
                repeated = patch.tolist() == [first] * len(patch)
                assert (
                    not mask.any()
                    or repeated
                    or (start % 4 == 3 and patch.tolist() == [*range(start, start + len(patch))])
                )


def test_the_share_that_is_spoilt():
    """On a long response: the ratio, half of it repeated; and drawn, patches of 1 .. 4 tokens and a ratio of the same mean."""
    slots = torch.arange(4000).expand(200, -1)
    response = slots >= 0
    spoilt, where = corrupt(slots, response, 4, 0.25, torch.Generator().manual_seed(0))
    assert where.double().mean() == pytest.approx(0.25, abs=0.004)
    repeated = (spoilt == slots // 4 * 4) & (slots % 4 > 0)
    assert repeated[where].double().mean() == pytest.approx(0.75 / 2, abs=0.01)
    spoilt, where = corrupt(slots, response, 4, 0.2, torch.Generator().manual_seed(0), drawn=True)
    shares = where.double().mean(1)
    assert shares.mean() == pytest.approx(0.2, abs=0.03) and shares.std() == pytest.approx(0.2 * 0.7555, abs=0.03)
    edges = {size: 0 for size in range(1, 5)}
    for picked in where:
        runs = [len(list(g)) for is_picked, g in itertools.groupby(picked.tolist()) if is_picked]
        edges[math.gcd(*runs)] += 1
    assert all(n > 20 for n in edges.values())


@pytest.mark.parametrize("stage", ["0", "1", "2a", "2b"])
def test_stages_train_what_they_say(stage, tmp_path, task):
    main = [*task, f"--stage={stage}", f"--out_dir={tmp_path}/a", "--max_iters=3", "--eval_interval=3"]
    trainer, _ = train.set_up(*train.parse(main, train.Options)[:2], train.Options())
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    trainer.step()
    moved = {name for name, p in trainer.model.named_parameters() if not torch.equal(p, before[name])}
    late = {name for name in before if name.startswith(("body.blocks.1.", "body.ln_f.", "body.lm_head"))}
    assert moved == {"0": set(before), "1": late, "2a": set(before) - late, "2b": set(before)}[stage]
    trainer.save("best.pt")
    assert set(load(f"{tmp_path}/a/best.pt")["model"]) == set(before)


# ---------------------------------------------------------------- decoding


def log_of(p):
    return (torch.tensor(p, dtype=torch.float64)).log()


class Oracle:
    """Knows the answer: every source says the token of the target, whatever it sees."""

    def __init__(self, answer):
        self.answer = answer

    def __call__(self, y, src, tgt, positions=None, allowed=None):
        right = torch.tensor([self.answer[t] if t < len(self.answer) else 0 for t in tgt.tolist()])
        return F.one_hot(right, V).double().mul(0.9).add(0.1 / V).log()


@pytest.mark.parametrize("N, length", [*itertools.product([0, 1, 2, 4, 8], [1, 4, 5, 16, 30])])
def test_calls_of_an_oracle(N, length):
    """ceil(T / k_f) + N, where T counts EOS; the draft counts as the first iteration."""
    answer = [EOS, 1, 2, *[i % 5 for i in range(length - 1)], EOS]
    decoder = Decoder(Oracle(answer), EOS, max_len=100, N=N)
    assert decode(decoder, answer[:3]) == answer
    assert decoder.calls == math.ceil(length / 4) + N
    without_end = [*answer[:-1], 1]
    decoder = Decoder(Oracle(without_end), EOS, max_len=len(answer), N=N)
    assert decode(decoder, answer[:3]) == without_end


@pytest.mark.parametrize("block", [1, 3, 5, 9])
def test_calls_of_an_oracle_in_a_small_block(block):
    """No more than b positions are open; each iteration fixes those that have been there for N more."""
    answer, N, seen = [EOS, 1, *[2] * 29, EOS], 2, [(2, 2)]
    decoder = Decoder(Oracle(answer), EOS, max_len=100, N=N, block=block)
    assert decode(decoder, answer[:2], lambda y, s: seen.append((len(y), s))) == answer
    ages, calls = [], 0  # the same by hand: a queue of open positions
    done = 0
    while done < 30:
        calls += 1
        ages = [a + 1 for a in ages] + [1] * min(4, block - len(ages), 30 - done - len(ages))
        while ages and ages[0] > N:
            done, ages = done + 1, ages[1:]
    assert decoder.calls == calls
    assert max(after - s for (_, s), (after, _) in itertools.pairwise(seen)) == min(block, 4 * (N + 1))


def test_prediction_is_a_weighted_mean():
    """Eq. 7 by a plain loop: all sources from the end of the prompt on, by lambda(d) and their confidence."""
    y, P, s, e = [EOS, 1, 2, 3, 0, 4], 2, 4, 8
    confidence = torch.rand(len(y), generator=torch.Generator().manual_seed(1), dtype=torch.float64) + 1
    said = torch.randn(10, 10, V, generator=torch.Generator().manual_seed(2), dtype=torch.float64).log_softmax(-1)
    decoder = Decoder(lambda y, src, tgt: said[src, tgt], EOS, max_len=20, k_f=3, k_b=2)
    found = predict(decoder, y, P, s, e, confidence)
    for t in range(s, e + 1):
        total, weights = torch.zeros(V, dtype=torch.float64), 0.0
        for m in range(P - 1, len(y)):
            d = t - m
            if -2 <= d <= 3:
                w = (math.exp(-8 * (d - 1)) if d > 0 else math.exp(-abs(d + 2) / 8)) * confidence[m].item()
                total, weights = total + w * said[m, t], weights + w
        assert torch.allclose(found[t - s], (total / weights).log_softmax(-1))


def test_far_offsets_have_a_weight():
    """Alone, the prediction from 16 tokens away counts."""
    decoder = Decoder(Oracle([EOS, 1, *[2] * 30, EOS]), EOS, max_len=40, k_f=16, N=0)
    assert decode(decoder, [EOS, 1]) == [EOS, 1, *[2] * 30, EOS] and decoder.calls == 2


@pytest.mark.parametrize("N, block", [*itertools.product([0, 1, 3], [1, 2, 5, 64])])
def test_next_token_alone_is_greedy_decoding(N, block):
    model, prompt = weighty(), [EOS, 1, 2]
    for length in (4, 15):
        greedy = list(prompt)
        while len(greedy) < length and EOS not in greedy[3:]:
            m = len(greedy) - 1
            greedy.append(model.log_p(torch.tensor(greedy), torch.tensor([m]), torch.tensor([m + 1])).argmax().item())
        decoder = Decoder(model.log_p, EOS, max_len=length, k_f=1, backward=False, N=N, block=block)
        assert decode(decoder, prompt) == greedy and len(greedy) == length


class Noisy:
    """Says something else in each call, for each pair."""

    def __init__(self, seed):
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, y, src, tgt, positions=None, allowed=None):
        return torch.randn(len(src), V, generator=self.generator, dtype=torch.float64).mul(2).log_softmax(-1)


@pytest.mark.parametrize("verifier, seed", [*itertools.product([False, True], range(5))])
def test_what_is_fixed_stays_and_nothing_follows_eos(verifier, seed):
    """Even of a source of nonsense: and it ends, since after 8 iterations without progress (and N more) a token is fixed."""
    seen, prompt = [([EOS, 1], 2)], [EOS, 1]

    def watch(y, s):
        before, fixed = seen[-1]
        assert s >= fixed and y[:fixed] == before[:fixed] and s <= len(y)
        assert EOS not in y[2:-1]
        seen.append((list(y), s))

    generator = torch.Generator().manual_seed(seed)
    decoder = Decoder(Noisy(seed), EOS, max_len=20, N=3, verifier=verifier, generator=generator, block=6)
    y = decode(decoder, prompt, watch)
    assert y == seen[-1][0][: seen[-1][1]] and (y[-1] == EOS or len(y) == 20)
    patience = 8 + (0 if verifier else 3)
    fixed = [s for _, s in seen]
    longest = max(len(list(group)) for _, group in itertools.groupby(fixed))
    assert longest <= patience
    if not verifier:
        torch.manual_seed(1)
        again = Decoder(Noisy(seed), EOS, max_len=20, N=3, block=6)
        assert decode(again, prompt) == y


def test_patience():
    """A source that never says the same twice in a row moves one token each 8 + N iterations."""
    calls = itertools.count()

    def flipping(y, src, tgt, *more):
        return F.one_hot(torch.full_like(tgt, next(calls) % 2), V).double().mul(5).log_softmax(-1)

    decoder = Decoder(flipping, EOS, max_len=5, N=2, k_f=1)
    decode(decoder, [EOS, 1])
    assert decoder.calls == 3 * 10


def test_patience_with_a_verifier():
    """Where no token ever gets a vote, one is accepted each 8 iterations of two calls."""
    flat = Decoder(
        lambda y, src, tgt, *more: torch.full((len(src), 40), -math.log(40)).double(), 39, max_len=6, verifier=True
    )
    flat.epsilon = 1.0  # nothing is likelier than the threshold exp(-H)
    assert len(decode(flat, [39, 1])) == 6 and flat.calls == 2 * 8 * 4


def test_weights_of_offsets():
    d = torch.tensor([1, 2, 0, -1, -2, -3, -8])
    wanted = [1, math.exp(-8), math.exp(-2 / 8), math.exp(-1 / 8), 1, math.exp(-1 / 8), math.exp(-6 / 8)]
    assert torch.allclose(weight(d), torch.tensor(wanted, dtype=torch.float64), rtol=1e-6)


# ---------------------------------------------------------------- candidates and verification


@pytest.mark.parametrize("seed", range(4))
def test_candidates_are_the_best_fills(seed):
    """Against all V^3 fills, cut behind their EOS, in the order of their product; gamma 1, 1, 1.1: one old token, two new."""
    log_pi = (
        torch.randn(3, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).mul(2).log_softmax(-1)
    )
    gamma = [1.0, 1.0, 1.1]
    fills = {}
    for fill in itertools.product(range(4), repeat=3):
        name = tuple(upto_end(list(fill), 3))
        score = sum(log_pi[i, x].item() / g for i, (x, g) in enumerate(zip(fill, gamma)))
        fills[name] = max(score, fills.get(name, -math.inf))
    wanted = sorted(fills, key=fills.get, reverse=True)
    tokens, _, found = candidates(log_pi, 1, 1000, 3)
    found = [tuple(tokens[i] for i in path) for path in found]
    assert found == wanted
    nodes = {name[: i + 1] for name in wanted for i in range(len(name))}
    assert len(tokens) == len(nodes)
    few, _, best = candidates(log_pi, 1, 9, 3)
    assert len(few) <= 9 and [tuple(few[i] for i in path) for path in best] == wanted[: len(best)]


def plain_verification(said):
    """v + v_CD of one token, from {offset: log p}."""
    near = {d: 1.0 if d == 1 else math.exp(-abs(d + 2)) for d in said if d <= 1}
    far = {d: math.exp(d - 1) for d in said if d > 1}
    score = sum(w * said[d] for d, w in near.items()) / sum(near.values())
    if far:
        score += max(0.0, said[1] - sum(w * said[d] for d, w in far.items()) / sum(far.values()))
    return score


def test_scores_and_votes_are_those_of_a_plain_loop():
    generator = torch.Generator().manual_seed(5)
    offsets, n = torch.tensor([*range(-4, 4)]), 200
    said, entropy = -3 * torch.rand(2, n, 8, generator=generator, dtype=torch.float64)
    entropy, there = -entropy, torch.rand(n, 8, generator=generator) < 0.7
    there[:, offsets == 1] = True
    said = said.masked_fill(~there, 0.0)
    scores, votes = verification(said, there, offsets), acceptance(said, there, entropy, offsets, 0.2)
    for i in range(n):
        heard = {d: said[i, j].item() for j, d in enumerate(offsets.tolist()) if there[i, j]}
        assert scores[i].item() == pytest.approx(plain_verification(heard))
        limits = {d: min(0.2, math.sqrt(0.2) * math.exp(-entropy[i, d + 4])) for d in heard}
        assert votes[i].item() == pytest.approx(sum(math.exp(heard[d]) > limits[d] for d in heard if d <= 1) / 6)
    assert len(set(votes.tolist())) > 4


@pytest.mark.parametrize("seed", [0, 1, 2, 11])
def test_a_verified_fill_is_that_of_a_plain_loop(seed):
    """The best fill and its votes, each fill by itself in a line, one source at a time."""
    model, y, P, s = weighty(), [EOS, 1, 2, 3, 0, 4, 1], 2, 4
    decoder = Decoder(model.log_p, EOS, max_len=20, k_f=3, k_b=2, verifier=True, block=8)
    log_pi = torch.randn(6, V, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).log_softmax(-1)
    best, c = verify(decoder, y, P, s, log_pi)
    assert decoder.calls == 1
    tokens, _, fills = candidates(log_pi, 3, 32, EOS)
    assert len(fills) > 2
    found = []
    for path in fills:
        line, v, votes = y[:s] + [tokens[i] for i in path], [], []
        for t in range(s, len(line)):
            sources = {d: t - d for d in range(-2, 4) if P - 1 <= t - d < len(line)}
            log_p = {
                d: model.log_p(torch.tensor(line), torch.tensor([m]), torch.tensor([t]))[0] for d, m in sources.items()
            }
            v.append(plain_verification({d: x[line[t]].item() for d, x in log_p.items()}))
            entropy = {d: -(x.exp() * x).sum().item() for d, x in log_p.items()}
            passed = [x[line[t]].exp() > min(0.2, 0.2**0.5 * math.exp(-entropy[d])) for d, x in log_p.items() if d <= 1]
            votes.append(sum(passed).item() / 4)
        found.append((sum(v) / len(v), line[s:], votes))
    _, line, votes = max(found)
    assert best == line and c.tolist() == pytest.approx(votes)


def test_an_end_has_two_votes():
    """EOS, behind which there is nothing: the next token and itself, of the ten that Eq. 10 counts."""
    said, offsets = log_of([[0.999] * 13]), torch.arange(-8, 5)
    votes = acceptance(said, (offsets >= 0)[None], torch.zeros_like(said), offsets, 0.2)
    assert votes.tolist() == pytest.approx([0.2])


def test_no_contrast_without_far_predictions():
    said, there = log_of([[0.5]]), torch.ones(1, 1, dtype=torch.bool)
    assert verification(said, there, torch.tensor([1])).tolist() == pytest.approx([math.log(0.5)])


def test_confidence_counts(monkeypatch):
    """A source that was hardly accepted weighs half of one that is fixed (1 + 0 against 1 + 1)."""
    import coral

    asked = []
    predict = coral.predict
    monkeypatch.setattr(coral, "predict", lambda *a: asked.append(a[-1]) or predict(*a))
    votes = iter([torch.tensor([1.0, 0.4, 0.6, 0.0])])
    monkeypatch.setattr(coral, "verify", lambda d, y, P, s, pi: ([1] * len(pi), next(votes, torch.zeros(len(pi)))))
    monkeypatch.setattr(torch, "rand", lambda n, generator: torch.full((n,), 0.5))
    decode(Decoder(Noisy(0), EOS, max_len=8, verifier=True), [EOS, 1])
    assert asked[0].tolist() == [2, 2]
    assert asked[1].tolist() == pytest.approx([2, 2, 2, 1.4, 1.4, 1.0])  # of four new tokens, the first was accepted


# ---------------------------------------------------------------- tasks


def test_a_product_stands_before_its_factors():
    for question, answer in zip(*(rows.tolist() for rows in tasks.product(200, np.random.default_rng(0)))):
        for i in range(len(question) // 4):
            a, b, c, d = question[4 * i : 4 * i + 4]
            assert answer[3 * i : 3 * i + 3] == [(a + b) * (c + d) % 10, (a + b) % 10, (c + d) % 10]
        assert len(answer) == 3 * (i + 1)


@pytest.mark.parametrize("name", tasks.PROMPT)
def test_tasks_are_documents_of_one_length(name):
    config = load_config([f"configs/coral_{name}.py"], {})
    texts = tasks.documents(name, 50, 3)
    assert texts == tasks.documents(name, 50, 3) != tasks.documents(name, 50, 4)
    assert {len(text) + 1 for text in texts} == {config.block_size} and config.prompt_length == tasks.PROMPT[name]
    if name == "reverse":
        assert all(text[64:] == text[:64][::-1] for text in texts)


# ---------------------------------------------------------------- commands


def test_stages_follow_each_other_and_go_on(command, task, tmp_path, monkeypatch):
    """Interrupted in any stage and called again: bit for bit what an uninterrupted call gives."""
    code, out, err = command("coral.py", *task, f"--out_dir={tmp_path}/a")
    assert code == 0, err
    whole = load(tmp_path / "a/2b/ckpt.pt")
    assert whole["iter"] == 6 and whole["config"]["learning_rate"] == 1e-3
    assert load(tmp_path / "a/1/ckpt.pt")["config"]["learning_rate"] == pytest.approx(5e-3)
    frozen, before = load(tmp_path / "a/1/best.pt")["model"], load(tmp_path / "a/0/best.pt")["model"]
    assert torch.equal(frozen["body.wte.weight"], before["body.wte.weight"])
    step, stopped = train.Trainer.step, set()

    def interrupted(self):
        self.stop = self.iter == 3 and self.config.stage not in stopped
        stopped.update({self.config.stage} if self.stop else ())
        return step(self)

    monkeypatch.setattr(train.Trainer, "step", interrupted)
    for stage in STAGES:
        command("coral.py", *task, f"--out_dir={tmp_path}/b")
        assert load(tmp_path / f"b/{stage}/ckpt.pt")["iter"] == 4
    command("coral.py", *task, f"--out_dir={tmp_path}/b")
    again = load(tmp_path / "b/2b/ckpt.pt")["model"]
    assert all(torch.equal(again[name], whole["model"][name]) for name in again)
    code, out, _ = command("coral.py", *task, f"--out_dir={tmp_path}/b")
    assert code == 0 and out.count("is finished") == 4
    monkeypatch.setattr(train.Trainer, "step", interrupted)
    stopped.clear()
    command("coral.py", *task, f"--out_dir={tmp_path}/b", "--overwrite")
    assert not (tmp_path / "b/2b/ckpt.pt").exists()  # nothing old stays behind what is new


def test_the_control_trains_the_next_token_for_as_long(command, finished, task):
    """As many steps as all stages, from where they begin; a second call leaves it and them alone."""
    state = load(finished / "control/ckpt.pt")
    assert state["iter"] == 24 and (state["config"]["stage"], state["config"]["init_from"]) == ("0", "scratch")
    code, out, err = command("coral.py", *task, f"--out_dir={finished}", "--control")
    assert code == 0 and out.count("is finished") == 5, err


def test_ways_to_decode_are_counted(command, finished, task, tmp_path):
    args = [*task, f"--out_dir={finished}", f"--results={tmp_path}"]
    code, out, err = command("coral.py", *args, "--evaluate", "--n=3")
    assert code == 0, err
    (file,) = (tmp_path / "coral_product").glob("s1337_*_n3.json")
    result = json.loads(file.read_text())
    ways = {way["way"]: way for way in result["ways"]}
    plain = ways["next token"]
    assert ways["next token, trained as long as all stages"]["calls"] >= 3 and "N = 8" in list(ways)[-2]
    assert plain["calls"] == plain["tokens"] and plain["n"] == 3
    assert ways["without verifier, N = 0"]["calls"] < plain["calls"]
    code, out, _ = command("coral.py", *args, "--table", "--n=3")
    assert "74.1% at 39.7/s" in out and "without multi-forward" in out
    code, out, err = command("coral.py", *args, "--offsets")
    assert code == 0, err
    (file,) = (tmp_path / "coral_product").glob("offsets_s1337_*.json")
    offsets = json.loads(file.read_text())["offsets"]
    assert set(map(int, offsets)) == set(range(-12, 7))


def test_a_draft_can_be_watched(command, finished):
    code, out, err = command("coral.py", finished, f"--text={QUESTION}", "--iterations=1")
    assert code == 0, err
    lines = out.splitlines()
    assert all("|" in line for line in lines[:-2]) and "calls" in lines[-1]
    code, out, _ = command("coral.py", finished, f"--text={QUESTION}", "--verifier", "--max_new_tokens=5")
    assert code == 0 and ("without an end" in out) == ("<|endoftext|>" not in out)


def test_answers_without_an_end_are_counted():
    answer_of = torch.tensor([[EOS, 1, 2, 3, EOS], [EOS, 1, 2, 3, 4]])
    for row, wanted in zip(answer_of, ((1, 0), (0, 1))):
        decoder = Decoder(Oracle(row.tolist()), EOS, max_len=5)
        found = coral_runs.answer(decoder, answer_of[:1], 2)
        assert (found["right"], found["unfinished"], found["tokens"], found["n"]) == (*wanted, 3, 1)


def test_a_gpt_is_decoded_token_by_token(command, trained):
    code, out, err = command("coral.py", trained, "--text=The 1", "--max_new_tokens=6")
    assert code == 0 and "model of the next token" in err and "(6 tokens in 6 calls" in out
    model, _, _ = open_run(str(trained), {})
    prompt = torch.tensor([[*b"The 1"]])
    known = torch.zeros(1, 11, dtype=torch.bool)
    forced = torch.arange(11)[None] < 5
    greedy = model.generate(F.pad(prompt, (0, 6)), known, lambda logits: logits.argmax(-1), forced=forced)
    assert bytes(x for x in greedy[0].tolist() if x < 256).decode("utf-8", "replace") in out


def test_coral_is_a_model_of_the_next_token_too(command, finished, task):
    """evaluate.py and sample.py take a stage like any run, in the modes that GPT has."""
    code, out, err = command("evaluate.py", finished / "2b")
    assert code == 0 and "unconditional" in out, err
    code, out, err = command("sample.py", finished / "2b", f"--prompt={QUESTION}", "--max_new_tokens=3")
    assert code == 0, err


def test_bad_input(expect_refusal, finished, trained, task, tmp_path):
    expect_refusal(["k_f = 5", "4 tokens ahead"], "coral.py", finished, "--text=123", "--k_f=5")
    expect_refusal(["block = 0"], "coral.py", finished, "--text=123", "--block=0")
    expect_refusal(["--text is empty"], "coral.py", finished, "--text=")
    expect_refusal(["shorten it"], "coral.py", finished, f"--text={'1' * 60}")
    expect_refusal(["name one config file"], "coral.py")
    expect_refusal(["no method = 'coral'"], "coral.py", "configs/tiny.py")
    text = [*task, f"--out_dir={finished}", f"--results={tmp_path}"]
    expect_refusal(["no questions"], "coral.py", *text, "--evaluate", "--prompt_length=0")
    expect_refusal([f"block_size = {SIZE}", f"{SIZE - 9}"], "coral.py", *text, "--evaluate", f"--block_size={SIZE - 9}")
    expect_refusal(["stage = '0'"], "coral.py", *text, "--evaluate", "--stage=0")
    expect_refusal(["only --text takes a folder"], "coral.py", finished, "--evaluate")
    expect_refusal(["not finished"], "coral.py", *text, "--evaluate", "--max_iters=9")
    expect_refusal(["stage = '1'", "train.py"], "coral.py", *task, f"--out_dir={finished}", "--stage=1")
    expect_refusal(["would go on", "--overwrite"], "coral.py", *task, f"--out_dir={finished}", "--max_iters=9")
    expect_refusal(["--text and --evaluate"], "coral.py", finished, "--evaluate", "--text=1")
    expect_refusal(["--n does nothing with --text"], "coral.py", finished, "--n=3", "--text=1")
    expect_refusal(["--results does nothing alone"], "coral.py", *text)
    text.pop()
    expect_refusal(["granularity = 2"], "coral.py", *text, "--granularity=2")
    expect_refusal(["started from", "--overwrite"], "coral.py", *text, "--skip_2a")
    expect_refusal(["law = 'prompt'", "r_max = 0"], "train.py", *task, "--r_max=0.5", f"--out_dir={tmp_path}/x")
    expect_refusal(["compile"], "train.py", *task, "--compile", f"--out_dir={tmp_path}/x")
    expect_refusal(
        ["method = coral, not gpt"],
        "train.py",
        *task,
        "--method=gpt",
        f"--init_from={finished}/0",
        f"--out_dir={tmp_path}/x",
    )
    expect_refusal(["no results"], "coral.py", "configs/coral_product.py", "--table", f"--results={tmp_path}")
    expect_refusal(["the next token only"], "coral.py", *task, f"--out_dir={finished}/0", "--offsets")
    expect_refusal([f"prompt_length = {SIZE + 1}", "lower it"], "train.py", *task, f"--prompt_length={SIZE + 1}")
    expect_refusal(["is not there"], "train.py", *task, f"--init_from={tmp_path}/none", f"--out_dir={tmp_path}/x")
    other = ["--n_embd=16", f"--out_dir={tmp_path}/x"]
    expect_refusal(["n_embd = 32, not 16"], "train.py", *task, *other, f"--init_from={finished}/0")


def test_a_window_wider_behind_is_allowed(command, finished):
    code, _, err = command("coral.py", finished, "--text=12", "--k_b=20", "--max_new_tokens=4")
    assert code == 0, err


def test_a_prompt_of_one_token(command, finished):
    code, _, err = command("coral.py", finished, "--text=1", "--max_new_tokens=4")
    assert code == 0, err


def test_stages_can_begin_from_a_run(command, task, finished, tmp_path):
    args = [*task, f"--init_from={finished}/0", f"--out_dir={tmp_path}/x", "--max_iters=2"]
    for _ in range(2):
        code, out, err = command("coral.py", *args)
        assert code == 0, err
    assert out.count("is finished") == 4
    assert [load(tmp_path / "x" / stage / "ckpt.pt")["config"]["init_from"] for stage in STAGES] == [
        f"{finished}/0", *(f"{tmp_path}/x/{stage}" for stage in STAGES[:-1])
    ]  # fmt: skip


def test_runs_of_unlike_prompts_are_not_compared(task, finished):
    config = load(finished / "0/ckpt.pt")["config"]
    runs = [
        (dataclasses.replace(load_config(task[:1], {}), **{**config, "prompt_length": n}), None)
        for n in (PROMPT, PROMPT, PROMPT + 5)
    ]
    assert len(evaluate.questions_of(runs[:2], "val")) == 2
    with pytest.raises(UserError, match="different questions"):
        evaluate.questions_of(runs, "val")


def test_a_run_can_start_from_another(command, task, trained, small, tmp_path):
    """Its weights, and for a head of its own the embedding."""
    args = [
        *small,
        "--method=coral",
        "--law=prompt",
        "--prompt_length=0",
        "--r_max=0",
        "--learning_rate=0",
        "--max_iters=1",
    ]
    code, _, err = command("train.py", *args, f"--init_from={trained}", f"--out_dir={tmp_path}/x")
    assert code == 0, err
    ours, theirs = load(tmp_path / "x/ckpt.pt")["model"], load(Path(trained) / "best.pt")["model"]
    assert torch.equal(ours["body.lm_head"], theirs["body.wte.weight"])
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)

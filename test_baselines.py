"""The baselines' exact facts: what sums to one, what equals what, and the laws of masked diffusion by enumeration.

Tiny models with large weights, as in test_masks.py; every expectation is enumerated here, on 4 or 5 tokens.
"""

import itertools
import math

import pytest
import torch

import baselines as B
import fast
import model as M
from test_masks import T, V, check_no_leak, check_sum_to_one, nll, random_queries

SIGMA = [(kind, positions) for kind in (B.SigmaTemporal, B.SigmaRandom) for positions in ("dual", "query")]


def weighty(method, **more):
    torch.manual_seed(0)
    model = method(M.Transformer(V, 2, n_head=2, n_embd=16), bos=V - 1, **more)
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(std=0.7)
    return model.double().eval()


class InRandomOrder(B.SigmaRandom):
    """Every sequence has the same shuffled order of its places."""

    def order(self, cond, generator, scored=None):
        return super().order(cond[:1], torch.Generator().manual_seed(5)).expand(cond.shape)


@pytest.mark.parametrize("kind, positions", [*SIGMA, (InRandomOrder, "dual"), (InRandomOrder, "query")])
def test_sigma_sums_to_one(kind, positions):
    check_sum_to_one(weighty(kind, sigma_positions=positions))


def test_mlm_sums_to_one():
    check_sum_to_one(weighty(B.MLM))


def test_no_leaks():
    for positions in ("dual", "query"):
        check_no_leak(weighty(B.SigmaTemporal, sigma_positions=positions))


@pytest.mark.parametrize("kind, positions", SIGMA)
def test_sigma_from_left_to_right_is_gpt(kind, positions):
    """Bit for bit with 'query'; but for rounding with 'dual', where both positions are the same distance apart."""
    tokens, cond = random_queries()
    prefix = torch.arange(T) < (torch.arange(len(tokens)) % T)[:, None]
    for known in (cond & False, prefix):
        sigma, gpt = nll(weighty(kind, sigma_positions=positions), tokens, known), nll(weighty(M.GPT), tokens, known)
        assert torch.equal(sigma, gpt) if positions == "query" else torch.allclose(sigma, gpt, atol=1e-5)


@pytest.mark.parametrize("positions", ["dual", "query"])
def test_the_target_position_matters(positions):
    """One known token, x_3: what it says of x_1 is not what it says of x_5."""
    model = weighty(B.SigmaTemporal, sigma_positions=positions)
    order = torch.tensor([[2, 0, 1, 3, 4], [2, 4, 0, 1, 3]])
    tokens = torch.ones(2, T, dtype=torch.long)
    model.order = lambda *args: order
    first = torch.zeros(2, T, dtype=torch.bool)
    first[0, 0] = first[1, 4] = True
    states = model.hidden(tokens, first & False, first)
    assert (states[0] - states[1]).abs().max() > 0.01


def sigma_by_hand(model, x, order, n_known):
    """NLL by place, one prediction at a time: a sequence cut off after the slot that predicts."""
    result = torch.zeros(len(x), dtype=torch.float64)
    for i in range(n_known, len(order)):
        slots = torch.tensor([[V - 1, *(x[j] for j in order[:i])]])
        own, target = [0, *(j + 1 for j in order[:i])], [j + 1 for j in order[: i + 1]]
        positions = torch.stack([torch.tensor([own]), torch.tensor([target])], -1)
        causal = torch.ones(1, i + 1, i + 1, dtype=torch.bool).tril()
        with torch.no_grad():
            logits = model.body.head(model.body(slots, positions, causal)[0, -1])[:V]
        result[order[i]] = -logits.log_softmax(-1)[x[order[i]]]
    return result


@pytest.mark.parametrize("kind, positions", SIGMA)
def test_sigma_against_one_prediction_at_a_time(kind, positions):
    """The first token of x_e is predicted by the slot before it and scored; each token lands at its place."""
    model, (tokens, cond) = weighty(kind, sigma_positions=positions), random_queries()
    for generator in (None, 7):

        def seeded():
            return generator and torch.Generator().manual_seed(generator)  # noqa: B023

        orders = model.order(cond, seeded())
        with torch.no_grad():
            found = model.exact_nll(tokens, cond, generator=seeded())
        for x, c, order, row in zip(tokens.tolist(), cond, orders.tolist(), found):
            n = int(c.sum())
            assert sorted(order) == list(range(T)) and c[order[:n]].all()
            assert torch.allclose(row, sigma_by_hand(model, x, order, n), atol=1e-5)
            assert (row > 0).sum() == T - n, "as many tokens are scored as x_e has"


def test_sigma_random_shuffles_both_sets():
    model, cond = weighty(B.SigmaRandom), torch.tensor([[True, True, False, False]]).expand(4000, 4)
    orders = model.order(cond, torch.Generator().manual_seed(0))
    kinds, counts = orders.unique(dim=0, return_counts=True)
    assert kinds.tolist() == [[a, b, c, d] for a, b in ((0, 1), (1, 0)) for c, d in ((2, 3), (3, 2))]
    assert (counts / 4000 - 0.25).abs().max() < 0.03


@pytest.mark.parametrize("kind, positions", SIGMA)
def test_sigma_generates_what_it_scores(kind, positions):
    model, (tokens, cond) = weighty(kind, sigma_positions=positions), random_queries()
    for seed in (None, 3):

        def seeded():
            return seed and torch.Generator().manual_seed(seed)  # noqa: B023

        out = model.generate(tokens.masked_fill(~cond, 0), cond, lambda logits: logits.argmax(-1), seeded())
        assert torch.equal(out[cond], tokens[cond])
        order = model.order(cond, seeded())
        for rank in range(T):  # every greedy choice, against the finished text
            place = order[:, rank : rank + 1]
            unknown = ~cond.gather(1, place)[:, 0]
            with torch.no_grad():
                best = [
                    model.exact_nll(out.scatter(1, place, v), cond, generator=seeded()).gather(1, place)[:, 0]
                    for v in range(V)
                ]
            assert torch.equal(torch.stack(best).argmin(0)[unknown], out.gather(1, place)[:, 0][unknown])


def test_dual_gives_half_of_the_frequencies_to_each_position():
    own, target = torch.tensor([[0, 3, 5]]), torch.tensor([[3, 5, 1]])
    for rope in B.dual(torch.stack([own, target], -1), 16):
        for part, of_own, of_target in zip(rope, M.rotary(own, 16), M.rotary(target, 16)):
            assert torch.equal(part[..., ::2], of_own[..., ::2]) and torch.equal(part[..., 1::2], of_target[..., 1::2])


@pytest.mark.parametrize("positions", ["dual", "query"])
def test_what_is_scored_comes_last(positions):
    """In a random order, [x_c | the rest of x_e | what is scored], against one prediction at a time."""
    model, (tokens, cond) = weighty(B.SigmaRandom, sigma_positions=positions), random_queries()
    scored = ~cond & (torch.rand(cond.shape, generator=torch.Generator().manual_seed(0)) < 0.5)
    orders = model.order(cond, torch.Generator().manual_seed(7), scored)
    with torch.no_grad():
        found = model.exact_nll(tokens, cond, scored, torch.Generator().manual_seed(7))
    assert (found[~scored] == 0).all()
    for x, c, s, order, row in zip(tokens.tolist(), cond, scored, orders.tolist(), found):
        n, m = int(c.sum()), T - int(s.sum())
        assert sorted(order) == list(range(T)) and c[order[:n]].all() and s[order[m:]].all()
        assert torch.allclose(row, sigma_by_hand(model, x, order, n) * s, atol=1e-5)


def test_the_generator_reaches_the_order():
    model, (tokens, cond) = weighty(B.SigmaRandom), random_queries()
    with torch.no_grad():
        a, b, c = (
            x.sum().item()
            for x in (
                model.training_loss(tokens, cond, torch.Generator().manual_seed(1))[0],
                model.score(tokens, cond, torch.Generator().manual_seed(1)),
                model.score(tokens, cond),
            )
        )
    assert math.isclose(a, b, rel_tol=1e-6) and abs(a - c) > 0.1


@pytest.mark.parametrize("kind", [B.SigmaTemporal, B.SigmaRandom, B.MLM])
def test_what_is_forced_informs_only_what_follows(kind):
    """With empty x_c: each token is the likeliest given those before it, forced or drawn, and not those after."""
    model, (tokens, forced) = weighty(kind), random_queries()
    empty = forced & False
    out = model.generate(tokens.masked_fill(~forced, 0), empty, lambda logits: logits.argmax(-1), forced=forced)
    assert torch.equal(out[forced], tokens[forced])
    for t in range(T):
        trial = [out.clone().index_fill(1, torch.tensor([t]), v) for v in range(V)]
        with torch.no_grad():
            best = torch.stack([model.exact_nll(x, empty)[:, t] for x in trial]).argmin(0)
        assert torch.equal(best[~forced[:, t]], out[:, t][~forced[:, t]])


# ---------------------------------------------------------------- MLM


def marginals(model, tokens, known):
    """log-probs (B, T, V) of every token given the known ones, by one plain bidirectional pass."""
    slots = torch.cat([torch.full_like(tokens[:, :1], V - 1), tokens.masked_fill(~known, V)], 1)
    everything = torch.ones(len(tokens), T + 1, T + 1, dtype=torch.bool)
    positions = torch.arange(tokens.size(1) + 1).expand(len(tokens), -1)
    everything = everything[:, : slots.size(1), : slots.size(1)]
    with torch.no_grad():
        return model.body.head(model.body(slots, positions, everything))[:, 1:, :V].log_softmax(-1)


def test_mlm_exact_is_the_loop_and_training_the_marginals():
    model, (tokens, cond) = weighty(B.MLM), random_queries()
    expected, known = torch.zeros(tokens.shape, dtype=torch.float64), cond.clone()
    for t in range(T):
        log_p = marginals(model, tokens, known)[:, t].gather(1, tokens[:, t : t + 1])[:, 0]
        expected[:, t] = torch.where(cond[:, t], 0.0, -log_p)
        known[:, t] = True
    assert torch.allclose(nll(model, tokens, cond), expected, atol=1e-6)
    some = torch.rand(cond.shape) < 0.5
    with torch.no_grad():
        assert torch.allclose(model.exact_nll(tokens, cond, some & ~cond), expected * some, atol=1e-6)
        loss, n = model.training_loss(tokens, cond)
    at_once = -marginals(model, tokens, cond).gather(2, tokens[..., None])[..., 0]
    assert n == (~cond).sum() and math.isclose(loss, (at_once * ~cond).sum(), rel_tol=1e-6)
    out = model.generate(tokens.masked_fill(~cond, 0), cond, lambda logits: logits.argmax(-1))
    for t in range(T):
        best = marginals(model, out, cond | (torch.arange(T) < t))[:, t].argmax(-1)
        assert torch.equal(out[:, t][~cond[:, t]], best[~cond[:, t]])
    assert torch.equal(out[cond], tokens[cond])


# ---------------------------------------------------------------- diffusion


def exact_nelbos(model, x, cond):
    """The NELBO of one sequence in three ways: uniform count, 1/t weight (integrated), mean over orders of the NLL."""
    unknown = (~cond[0]).nonzero()[:, 0].tolist()
    n = len(unknown)

    def nlls(masked):
        known = torch.ones_like(cond)
        known[0, list(masked)] = False
        log_p = marginals(model, x, known)[0]
        return sum(-log_p[i, x[0, i]].item() for i in masked)

    of_subset = {s: nlls(s) for k in range(1, n + 1) for s in itertools.combinations(unknown, k)}
    counts = sum((1 / n) * (n / len(s)) * nll / math.comb(n, len(s)) for s, nll in of_subset.items())
    ts = (torch.arange(2000, dtype=torch.float64) + 0.5) / 2000  # each token masked with probability t, weight 1/t
    weights = sum((ts ** (len(s) - 1) * (1 - ts) ** (n - len(s))).mean().item() * nll for s, nll in of_subset.items())
    orders = []
    for order in itertools.permutations(unknown):
        known, total = cond.clone(), 0.0
        for i in order:
            total += -marginals(model, x, known)[0, i, x[0, i]].item()
            known[0, i] = True
        orders.append(total)
    return counts, weights, sum(orders) / len(orders)


def test_bound_by_enumeration():
    model = weighty(B.Diffusion)
    x, cond = torch.tensor([[1, 0, 2, 3, 1]]), torch.tensor([[False, True, False, False, False]])
    by_count, by_weight, over_orders = exact_nelbos(model, x, cond)
    assert math.isclose(by_count, over_orders, rel_tol=1e-6) and math.isclose(by_weight, over_orders, rel_tol=1e-6)
    n = 4000
    g = torch.Generator().manual_seed(0)
    with torch.no_grad():
        draws = model.score(x.expand(n, -1), cond.expand(n, -1), g).sum(1)
    error = draws.std() / math.sqrt(n)
    assert abs(draws.mean() - over_orders) < 4 * error and error < 0.05 * over_orders, (draws.mean(), over_orders)
    loss, counted = model.training_loss(x, cond, torch.Generator().manual_seed(1))
    with torch.no_grad():
        again = model.score(x, cond, torch.Generator().manual_seed(1)).sum()
    assert counted == 4 and loss.requires_grad and math.isclose(loss.item(), again, rel_tol=1e-6)


def test_diffusion_sampler_follows_its_law():
    """Two unknown tokens in S = 2 steps: both in one with probability 1/2, else one after the other, either first."""
    model = weighty(B.Diffusion)
    x, cond = torch.tensor([[1, 0, 2, 3, 1]]), torch.tensor([[True, False, True, False, True]])
    a, b = 1, 3
    both = marginals(model, x, cond)[0].exp()
    law = torch.zeros(V, V, dtype=torch.float64)
    for u in range(V):
        for v in range(V):
            filled = x.clone()
            filled[0, a], filled[0, b] = u, v
            a_first = both[a, u] * marginals(model, filled, cond | (torch.arange(T) == a))[0].exp()[b, v]
            b_first = both[b, v] * marginals(model, filled, cond | (torch.arange(T) == b))[0].exp()[a, u]
            law[u, v] = 0.5 * both[a, u] * both[b, v] + 0.25 * a_first + 0.25 * b_first
    assert math.isclose(law.sum(), 1, rel_tol=1e-6)
    n, g, draw = 20_000, torch.Generator().manual_seed(0), torch.Generator().manual_seed(1)
    out = model.generate(
        x.expand(n, -1).masked_fill(~cond, 0), cond.expand(n, -1),
        lambda logits: torch.multinomial(logits.softmax(-1), 1, generator=draw)[:, 0], g, steps=2,
    )  # fmt: skip
    assert torch.equal(out[:, cond[0]], x[:, cond[0]].expand(n, -1)), "known tokens stay"
    found = torch.zeros(V, V, dtype=torch.float64).index_put((out[:, a], out[:, b]), torch.ones(n).double(), True) / n
    assert (found - law).abs().max() < 4 * math.sqrt(0.25 / n), (found, law)


def test_diffusion_takes_as_many_steps_as_tokens(monkeypatch):
    """By default: of T masked tokens about T (1 - 1/e) steps open one or more."""
    model, calls = weighty(B.Diffusion), []
    hidden = model.hidden
    model.hidden = lambda *args: (calls.append(args), hidden(*args))[1]
    n, g = 200, torch.Generator().manual_seed(0)
    for _ in range(n):
        model.generate(torch.zeros(1, T).long(), torch.zeros(1, T, dtype=torch.bool), lambda x: x.argmax(-1), g)
    expected = T * (1 - (1 - 1 / T) ** T)
    assert abs(len(calls) / n - expected) < 0.2, (len(calls) / n, expected)


def test_diffusion_has_no_exact_likelihood():
    tokens, cond = random_queries()
    with pytest.raises(ValueError, match="no exact"):
        weighty(B.Diffusion).exact_nll(tokens, cond)


def test_scaled_loss_is_the_scaled_sum(monkeypatch):
    monkeypatch.setattr(fast, "ROWS", 3)
    model, (tokens, cond) = weighty(M.ACGPT), random_queries()
    scale = torch.rand(cond.shape, dtype=torch.float64)
    loss = model.summed_nll(tokens, cond, ~cond, scale, None)
    plain = (model.exact_nll(tokens, cond) * scale).sum()
    assert math.isclose(loss.item(), plain.item(), rel_tol=1e-9)
    quick, slow = (torch.autograd.grad(x, model.body.wte.weight)[0] for x in (loss, plain))
    assert torch.allclose(quick, slow, atol=1e-9)

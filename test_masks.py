"""AC-GPT's exact facts (who sees whom, what predicts what), and that each of them fails on deliberately broken code.

    pytest test_masks.py
    python test_masks.py --device=cuda --dtype=bfloat16      without pytest, on any device
    python test_masks.py --show                              draw all methods on seven tokens, also as PNGs
    python test_masks.py --run=out/tiny-ac_gpt-r0.6-s1337    leak check on a trained model

The reference below shares no code with model.py: plain loops over tokens, its own attention, complex numbers for RoPE.
"""

import contextlib
import itertools
import math
from dataclasses import dataclass

import numpy as np
import torch

import fast
import model as M
from baselines import METHODS
from bench import Naive
from checkpoint import open_run
from conditioning import augment
from config import Config, UserError, key, parse, resolve_machine, run
from evaluate import evaluation_set

SETTING = {"device": "cpu", "dtype": torch.float64}
# RoPE's angles are float32 in every model, so float64 models are only this close to the float64 reference.
TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-3, torch.bfloat16: 0.06, torch.float16: 0.02}
V, T = 4, 5  # a vocabulary of 4, of which 3 is the separator and so BOS; 5 body tokens


def small_model(method=M.ACGPT, n_layer=2):
    """Weights so large that any leak shows."""
    torch.manual_seed(0)
    model = method(M.Transformer(V, n_layer, n_head=2, n_embd=16), bos=V - 1)
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(std=0.7)
    return model.to(SETTING["device"], SETTING["dtype"]).eval()


def random_queries(n=24, seed=1):
    """tokens and cond (n, T); every |x_c| from 0 to T - 1 occurs, so there is padding."""
    g = torch.Generator().manual_seed(seed)
    cond = torch.rand(n, T, generator=g).argsort(1) < torch.arange(n)[:, None] % T
    return torch.randint(V, (n, T), generator=g).to(SETTING["device"]), cond.to(SETTING["device"])


@torch.no_grad()
def nll(model, tokens, cond):
    return model.exact_nll(tokens, cond).double().cpu()


def assert_close(a, b, what):
    worst = (a.double() - b.double()).abs().max().item()
    assert worst <= TOLERANCE[SETTING["dtype"]], f"{what}: differs by {worst:.2e}"


# ---------------------------------------------------------------- the reference: one query, plain loops


def reference_nll(model, x, known):
    """-log p of each unknown token of one sequence, from the weights and the paper's Section 3 alone."""
    w = {name: p.double().cpu().numpy() for name, p in model.body.state_dict().items()}
    slots = [("copy", i, x[i - 1]) for i in range(1, len(x) + 1) if known[i - 1]]
    slots += [("body", 0, V - 1)] + [("body", i, x[i - 1]) for i in range(1, len(x) + 1)]

    def sees(a, b):
        return b[0] == "copy" or (a[0] == "body" and b[1] <= a[1])

    def norm(h, name):
        return (h - h.mean()) / np.sqrt(h.var() + 1e-5) * w[name + ".weight"] + w[name + ".bias"]

    def linear(h, name):
        return w[name + ".weight"] @ h + w[name + ".bias"]

    def turned(h, position):  # (d,) -> complex (d/2,)
        half = len(h) // 2
        return np.array(
            [complex(h[j], h[j + half]) * np.exp(1j * position * 10000 ** (-j / half)) for j in range(half)]
        )

    hidden = [w["wte.weight"][token] for _, _, token in slots]
    heads, d = model.body.blocks[0].attn.n_head, model.body.d
    for layer in range(len(model.body.blocks)):
        name = f"blocks.{layer}."
        qkv = [linear(norm(h, name + "ln_1"), name + "attn.qkv").reshape(3, heads, d) for h in hidden]
        after = []
        for a, h in enumerate(hidden):
            mixed = []
            for head in range(heads):
                visible = [b for b in range(len(slots)) if sees(slots[a], slots[b])]
                q = turned(qkv[a][0, head], slots[a][1])
                scores = [(q * turned(qkv[b][1, head], slots[b][1]).conj()).real.sum() / math.sqrt(d) for b in visible]
                weights = np.exp(np.array(scores) - max(scores))
                mixed.append(sum(p * qkv[b][2, head] for p, b in zip(weights / weights.sum(), visible)))
            h = h + linear(np.concatenate(mixed), name + "attn.proj")
            u = linear(norm(h, name + "ln_2"), name + "fc")
            gelu = 0.5 * u * (1 + np.tanh(math.sqrt(2 / math.pi) * (u + 0.044715 * u**3)))
            after.append(h + linear(gelu, name + "proj"))
        hidden = after
    first = slots.index(("body", 0, V - 1))
    result = np.zeros(len(x))
    for i in range(len(x)):
        if not known[i]:
            logits = w["wte.weight"][:V] @ norm(hidden[first + i], "ln_f")  # the slot before x_{i+1}
            result[i] = np.log(np.exp(logits - logits.max()).sum()) + logits.max() - logits[x[i]]
    return result


# ---------------------------------------------------------------- the facts


def check_reference(model):
    tokens, cond = random_queries()
    expected = [reference_nll(model, x, c) for x, c in zip(tokens.tolist(), cond.tolist())]
    assert_close(nll(model, tokens, cond), torch.tensor(np.array(expected)), "product and reference")


def check_no_leak(model):
    """Another token at j in x_e changes no log-prob before j; nor that of the old token at j."""
    tokens, cond = random_queries()
    for j in range(T):
        other = tokens.clone()
        other[:, j] = (tokens[:, j] + 1) % V
        with torch.no_grad():
            before, after = (model.logits(x, cond).log_softmax(-1)[:, : j + 1, :V] for x in (tokens, other))
        unknown = ~cond[:, : j + 1] & ~cond[:, j : j + 1]
        assert_close(before[unknown], after[unknown], f"log-probs up to x_{j + 1}, which is in x_e and was changed")


def check_sum_to_one(model):
    """Over all completions, for each of the 2^T queries: the sum of p(x_e | x_c) is 1."""
    tokens, _ = random_queries()
    for known in itertools.product((False, True), repeat=T):
        cond = torch.tensor(known, device=tokens.device)
        fillings = torch.cartesian_prod(
            *[torch.tensor([x]) if k else torch.arange(V) for x, k in zip(tokens[0].cpu(), known)]
        )
        fillings = fillings.reshape(-1, T).to(tokens.device)
        total = (-nll(model, fillings, cond.expand(len(fillings), T)).sum(1)).exp().sum()
        assert_close(total, torch.tensor(1.0), f"sum over completions, known = {known}")


def check_one_by_one(model):
    """A query's answer does not depend on the batch around it, and so not on padding."""
    tokens, cond = random_queries()
    single = torch.cat([nll(model, tokens[i : i + 1], cond[i : i + 1]) for i in range(len(tokens))])
    assert_close(nll(model, tokens, cond), single, "batched and one by one")


def check_future_is_used(model):
    """Another known token changes the predictions before it."""
    tokens, cond = random_queries()
    cond[:, -1], cond[:, 0] = True, False
    other = tokens.clone()
    other[:, -1] = (tokens[:, -1] + 1) % V
    change = (nll(model, tokens, cond) - nll(model, other, cond))[:, 0].abs()
    assert change.mean() > 0.01, f"x_1 does not notice the known x_{T}: {change.mean():.1e}"


FACTS = (check_reference, check_no_leak, check_sum_to_one, check_one_by_one, check_future_is_used)


def test_facts():
    for check in FACTS:
        check(small_model())


def test_empty_condition_is_gpt():
    model, gpt = small_model(), small_model(M.GPT)
    tokens, cond = random_queries()
    empty = torch.zeros_like(cond)
    assert_close(nll(model, tokens, empty), nll(gpt, tokens, empty), "AC-GPT with empty x_c, and GPT")
    mixed = empty.clone()
    mixed[0] = True  # a batch in which one sequence has copies: the others have padding only
    assert_close(nll(model, tokens, mixed)[1:], nll(gpt, tokens, empty)[1:], "the same beside a query with copies")


def test_copies_in_any_order():
    class Reversed(Broken):
        def edit(self, tokens, positions, P):
            order = torch.cat([torch.arange(P - 1, -1, -1), torch.arange(P, tokens.size(1))]).to(tokens.device)
            return tokens[:, order], positions[:, order]

    tokens, cond = random_queries()
    cond = (cond.int().argsort(1) % T) < 3  # |x_c| = 3 everywhere, so that reversing moves no padding
    assert_close(nll(small_model(Reversed), tokens, cond), nll(small_model(), tokens, cond), "copies reversed")


def test_only_the_vocabulary_has_probability():
    tokens, cond = random_queries()
    p = small_model().logits(tokens, cond).softmax(-1)
    assert p.size(-1) == 64 and (p[..., V:] == 0).all(), "MASK and the filling of the table must have none"


def test_generate_draws_from_what_is_scored():
    """The logits on the way equal those of one pass over the finished text; known and forced tokens stay."""
    model = small_model()
    tokens, cond = random_queries()
    for forced in (None, random_queries(seed=2)[1]):
        seen = []
        blank = tokens.masked_fill(~(cond if forced is None else cond | forced), -1)  # no id: nobody may look at it
        out = model.generate(blank, cond, lambda logits: (seen.append(logits), logits.argmax(-1))[1], forced=forced)  # noqa: B023
        keep = cond if forced is None else cond | forced
        assert (out == tokens)[keep].all() and len(seen) == (~keep).any(0).sum()
        with torch.no_grad():
            final = model.logits(out, cond).log_softmax(-1)[..., :V]
        for t, logits in zip((~keep).any(0).nonzero()[:, 0].tolist(), seen):
            drawn_from = logits.log_softmax(-1)[~keep[:, t], :V]
            assert_close(drawn_from, final[:, t][~keep[:, t]], f"generating and scoring x_{t + 1}")


def test_sums_are_float32():
    """In bfloat16, log-probs and their sum are float32 still, and the gradients come."""
    tokens, cond = random_queries()
    model = small_model().bfloat16()
    loss, n = model.training_loss(tokens, cond)
    loss.backward()
    exact = model.exact_nll(tokens, cond)
    assert loss.dtype == exact.dtype == torch.float32 and abs(loss - exact.sum()) < 1e-3 * loss
    assert exact.unique().numel() > 0.9 * n, "bfloat16 would have merged many of them"


def test_both_attentions_drop():
    """Copies alone, and the body alone."""
    q = torch.randn(8, 2, 4)
    for P, part in ((8, slice(0, 8)), (0, slice(0, 8)), (4, slice(0, 4)), (4, slice(4, 8))):
        a, b = (fast.attend_packed(q, q, q, [(P, 8)], 0.5)[part] for _ in range(2))
        assert not torch.equal(a, b), (P, part)


def test_dropout_is_everywhere():
    """In the attention, the blocks and the embedding: with one at a time, training mode must be random."""
    tokens, cond = random_queries()
    for part in ("blocks.0.attn", "blocks.0.drop", "drop"):
        model = small_model().train()
        module = model.body.get_submodule(part)
        setattr(module, "dropout" if part.endswith("attn") else "p", 0.5)
        assert not torch.equal(nll(model, tokens, cond), nll(model, tokens, cond)), part
    model = small_model().train()
    for block in model.body.blocks:
        block.drop.p = 1.0  # nothing of attention or MLP is left
    slots = torch.cat([torch.full_like(tokens[:, :1], V - 1), tokens[:, :-1]], 1)
    with torch.no_grad():
        embedded = model.body.head(model.body.ln_f(model.body.wte(slots)))
        assert_close(model.logits(tokens, cond)[..., :V], embedded[..., :V], "all dropped, and the embedding alone")


def test_gpt_refuses_a_future():
    tokens, _ = random_queries()
    known = torch.arange(T, device=tokens.device).expand(len(tokens), T) < 2
    gpt = small_model(M.GPT)
    assert_close(nll(gpt, tokens, known), nll(gpt, tokens, known & False) * ~known.cpu(), "a known prefix")
    try:
        nll(gpt, tokens, known.flip(1))
    except ValueError as e:
        assert "GPT has no" in str(e)
    else:
        raise AssertionError("GPT gave a value for p(past | future)")


def test_training_loss_counts_what_is_trained():
    tokens, cond = random_queries()
    for method, counted in ((M.ACGPT, ~cond), (M.GPT, torch.ones_like(cond))):
        loss, n = small_model(method).training_loss(tokens, cond)
        assert n == counted.sum()
        empty = cond & ~counted
        assert_close(loss, nll(small_model(method), tokens, empty).sum(), f"{method.__name__}: training and exact")


# ---------------------------------------------------------------- shortcuts: fast.py against plain code


@contextlib.contextmanager
def changed(module, name, value):
    old = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, old)


def loss_and_gradients(model, tokens, cond):
    loss, n = model.training_loss(tokens, cond)
    (3 * loss / n).backward()
    return {"loss": loss / n} | {name: p.grad for name, p in model.named_parameters()}


def test_shortcuts_change_nothing():
    """Without mask, padding, all the logits, and all rows of the last block: the same loss and gradients."""
    tokens, cond = random_queries()
    naive = loss_and_gradients(small_model(Naive).float(), tokens, cond)
    with changed(fast, "ROWS", 7):  # many parts, the last one not full
        quick = loss_and_gradients(small_model().float(), tokens, cond)
    for name, value in naive.items():
        error = (quick[name] - value).abs().max() / value.abs().max().clamp(min=1)
        assert error < 1e-5, f"{name} differs by {error:.1e}"


def test_the_cache_changes_nothing():
    """The likeliest tokens, one after the other: with a cache as with a full pass for each, in a batch of all |x_c|."""
    model = small_model().double()
    tokens, cond = random_queries()
    out = model.generate(tokens, cond, lambda logits: logits.argmax(-1))
    expected = tokens.masked_fill(~cond, 0)
    for t in range(T):
        with torch.no_grad():
            best = model.logits(expected, cond)[:, t].argmax(-1)
        expected[:, t] = torch.where(cond[:, t], expected[:, t], best)
    assert torch.equal(out, expected) and not torch.equal(out, tokens)


def copies_causal(q, k, v, sizes, dropout=0.0):
    return fast_attend(q, k, v, [(0, L) for _, L in sizes])


def one_copy_too_many(q, k, v, sizes, dropout=0.0):
    return fast_attend(q, k, v, [(min(P + 1, L), L) for P, L in sizes])


def neighbours_seen(q, k, v, sizes, dropout=0.0):
    return fast_attend(q, k, v, [(sizes[0][0], sum(L for _, L in sizes))])


fast_attend = fast.attend_packed


def test_broken_shortcuts_are_caught():
    if SETTING["dtype"].itemsize == 2:
        return  # too coarse to notice one copy
    for broken in (copies_causal, one_copy_too_many, neighbours_seen):
        with changed(fast, "attend_packed", broken):
            assert fails(check_reference, small_model()), broken.__name__


# ---------------------------------------------------------------- broken on purpose


class Broken(M.ACGPT):
    """AC-GPT with its mask and its padding, step by step; a subclass spoils one of them."""

    def edit(self, tokens, positions, P):
        return tokens, positions

    def mask(self, present, P):
        return M.ac_mask(present, P)

    def rows(self, hidden, T):
        return hidden[:, -T:]

    def hidden(self, tokens, cond, scored, generator=None):
        T = tokens.size(1)
        tokens, positions, present = self.arrange(tokens, cond)
        P = tokens.size(1) - T
        tokens, positions = self.edit(tokens, positions, P)
        hidden = self.body(tokens, positions, self.mask(present[:, : tokens.size(1)], P))
        return self.rows(hidden, T)[scored]


class CopiesOmitted(M.ACGPT):
    """Everybody looks at the known tokens in their places instead."""

    def hidden(self, tokens, cond, scored, generator=None):
        body, positions, _ = augment(tokens, torch.zeros_like(cond), self.bos)
        known = torch.cat([torch.zeros_like(cond[:, :1]), cond[:, :-1]], 1)
        causal = torch.ones(T, T, dtype=torch.bool, device=tokens.device).tril()
        return self.body(body, positions, causal | known[:, None])[scored]


class CopiesSeeBody(Broken):
    def mask(self, present, P):
        allowed = super().mask(present, P)
        allowed[:, :P, P:] = True
        return allowed


class NoBos(Broken):
    """[copies | x]: the last copy, or x_1 itself, has to predict x_1."""

    def edit(self, tokens, positions, P):
        return (torch.cat([x[:, :P], x[:, P + 1 :]], 1) for x in (tokens, positions))

    def rows(self, hidden, T):
        P = hidden.size(1) - (T - 1)
        return torch.cat([hidden[:, max(P - 1, 0) :][:, :1], hidden[:, P:]], 1)


class PositionsShifted(Broken):
    def edit(self, tokens, positions, P):
        return tokens, torch.cat([positions[:, :P] + 1, positions[:, P:]], 1)


class TargetsNotShifted(Broken):
    def rows(self, hidden, T):
        return torch.cat([hidden[:, 1 - T :], hidden[:, -1:]], 1)


class TargetsShiftedTwice(Broken):
    def rows(self, hidden, T):
        return torch.cat([hidden[:, -T:][:, :1], hidden[:, -T:-1]], 1)


class PaddingVisible(Broken):
    def mask(self, present, P):
        return super().mask(torch.ones_like(present), P)


# Which facts catch what. Sum-to-one is blind to shifted positions and to a double shift: that is why there is a reference.
MUTATIONS = {
    CopiesOmitted: {check_reference, check_no_leak, check_sum_to_one},
    CopiesSeeBody: {check_reference, check_no_leak, check_sum_to_one},
    NoBos: {check_reference, check_sum_to_one},
    PositionsShifted: {check_reference},
    TargetsNotShifted: {check_reference, check_no_leak, check_sum_to_one},
    TargetsShiftedTwice: {check_reference},
    PaddingVisible: {check_reference, check_one_by_one},
}


def fails(fact, model):
    try:
        fact(model)
    except AssertionError:
        return True
    return False


def test_each_mutation_is_caught():
    for mutation, catchers in MUTATIONS.items():
        passed = [fact.__name__ for fact in catchers if not fails(fact, small_model(mutation))]
        if SETTING["dtype"].itemsize == 2:  # too coarse for the small leaks: one alarm is enough
            passed = passed if len(passed) == len(catchers) else []
        assert not passed, f"{mutation.__name__} passes {', '.join(passed)}"


def test_one_layer_hides_omitted_copies():
    """Why leak tests use two layers: with one, attending to the originals in their places leaks nothing."""
    model = small_model(CopiesOmitted, n_layer=1)
    assert not fails(check_no_leak, model) and not fails(check_sum_to_one, model) and fails(check_reference, model)


# ---------------------------------------------------------------- a trained model, and the picture


def check_trained(folder):
    """The leak check on a trained run: new tokens after a place in x_e change nothing before it, but known ones do."""
    model, config, _ = open_run(folder, {"device": "cpu", "dtype": "float32"})
    if model.bound:
        raise UserError(f"{folder} is a {config.method}: it has no exact likelihood to check")
    questions = evaluation_set(config, "val")
    if not model.can_condition_on(questions.cond["training"]):
        raise UserError(f"{folder} is a {config.method}: it knows no future that could leak")
    tokens, cond = questions.tokens[:32], questions.cond["training"][:32]
    g = torch.Generator().manual_seed(0)
    noise = torch.randint(model.body.vocab_size, tokens.shape, generator=g)
    late = torch.arange(tokens.size(1)) >= tokens.size(1) // 2
    old = nll(model, tokens, cond)[:, ~late]
    unknown_changed = nll(model, tokens.where(cond | ~late, noise), cond)[:, ~late]
    known_changed = nll(model, tokens.where(~cond | ~late, noise), cond)[:, ~late]
    leak, use = (old - unknown_changed).abs().max().item(), (old - known_changed).abs().max().item()
    print(f"leak check of {folder}, log-probs of the first half:")
    print(f"  change the unknown tokens of the second half: they move by {leak:.1e} (must be < 1e-4)")
    print(f"  change its known tokens: they move by up to {use:.2f} (must be > 0.1)")
    assert leak < 1e-4, "the model sees unknown tokens of the future"
    assert use > 0.1, "the model ignores known tokens of the future"


def seven_tokens(name):
    """What the body gets in a training step on x1..x7 with x_c = {x2, x5, x6}.

    -> (names of the slots, what each predicts, allowed (L, L), number of copies).
    """
    model, seen = small_model(METHODS[name]).cpu().float(), {}

    def forward(tokens, positions, sizes, rows):
        seen.update(tokens=tokens, positions=positions, sizes=sizes, rows=rows)
        return torch.zeros(len(rows), 16)

    model.body.forward = forward
    cond = torch.tensor([[False, True, False, False, True, True, False]])
    model.training_loss(torch.zeros_like(cond).long(), cond, torch.Generator().manual_seed(4))
    ((P, L),) = seen["sizes"]
    own, target = (
        seen["positions"].unbind(-1) if name.startswith("sigma") else (seen["positions"], seen["positions"] + 1)
    )
    own, target = own.tolist(), (own if P == L else target).tolist()  # a bidirectional model predicts in place
    masked = (seen["tokens"] == V).tolist()
    copies = P if P < L else 0
    names = [
        "BOS" if place == 0 else "MASK" if masked[i] else f"x{place}'" if i < copies else f"x{place}"
        for i, place in enumerate(own)
    ]
    rows = set(seen["rows"].tolist())
    slot = torch.arange(L)
    allowed = (slot <= slot[:, None]) | (slot < P)
    return names, [f"x{target[i]}" if i in rows else "" for i in range(L)], allowed, copies


def draw(axes, name, names, predicts, allowed, copies):
    from matplotlib.colors import ListedColormap

    L, shade = len(names), allowed.int().numpy().copy()
    shade[:, :copies] *= 2
    math_names = [rf"$\bar{{x}}_{n[1]}$" if "'" in n else rf"$x_{n[1]}$" if n[0] == "x" else n for n in names]
    axes.imshow(shade, cmap=ListedColormap(["#f2f2f2", "#4c78a8", "#f58518"]), vmin=0, vmax=2)
    axes.set_xticks(range(L), [n.replace("MASK", "M").replace("BOS", "B") for n in math_names])
    axes.set_yticks(range(L), math_names)
    axes.xaxis.tick_top()
    for ticks in (axes.set_xticks, axes.set_yticks):
        ticks(np.arange(L + 1) - 0.5, minor=True)
    axes.grid(which="minor", color="white", linewidth=2)
    axes.tick_params(which="both", length=0)
    if copies:
        axes.axhline(copies - 0.5, color="black", linewidth=1.2)
        axes.axvline(copies - 0.5, color="black", linewidth=1.2)
    for row, target in enumerate(predicts):
        axes.text(L, row, rf"$\to x_{target[1]}$" if target else "", va="center", fontsize=12)
    axes.set_title(name, pad=28)


def show():
    """Print who sees whom in each method, and draw it into results/ac_gpt_mask.png and results/masks.png."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    print("x1..x7 with x_c = {x2, x5, x6}. Row: who looks. Column: at whom. x2' is the copy of x2.")
    figure, panels = plt.subplots(2, 3, figsize=(15, 10.5))
    for name, axes in zip(METHODS, panels.flat):
        names, predicts, allowed, copies = seven_tokens(name)
        print(f"\n{name}\n      " + "".join(f"{label:>5}" for label in names) + "   predicts")
        for label, target, row in zip(names, predicts, allowed.tolist()):
            print(f"{label:>6}" + "".join(f"{'#' if may else '.':>5}" for may in row) + f"   {target}".rstrip())
        draw(axes, name, names, predicts, allowed, copies)
    figure.tight_layout()
    figure.savefig("results/masks.png", dpi=80)
    figure, axes = plt.subplots(figsize=(6.2, 5.2))
    draw(axes, "", *seven_tokens("ac_gpt"))
    axes.set_xlabel("looked at: copies of the known tokens | BOS and the sequence")
    axes.set_ylabel("who looks")
    figure.savefig("results/ac_gpt_mask.png", dpi=130, bbox_inches="tight")
    print("\nresults/masks.png, results/ac_gpt_mask.png")


@dataclass
class Options:
    show: bool = key(False, "draw all methods on seven tokens")
    run: str | None = key(None, "run folder: leak check on its trained model")


def main(argv):
    paths, given, options = parse(argv, Options, __doc__)
    if paths:
        raise UserError(f"what is {paths[0]}? a trained run to check is named by --run=FOLDER")
    dtypes = {str(dtype).removeprefix("torch."): dtype for dtype in TOLERANCE}
    if given.get("dtype", "float64") not in dtypes:
        raise UserError(f"dtype = {given['dtype']!r} is unknown: choose from {', '.join(dtypes)}")
    SETTING["device"] = resolve_machine(Config(device=given.get("device", "cpu"), dtype="float32")).device
    SETTING["dtype"] = dtypes[given.get("dtype", "float64")]
    if options.show:
        show()
    elif options.run:
        check_trained(options.run)
    else:
        for name, test in list(globals().items()):
            if name.startswith("test_"):
                test()
                print(f"passed  {name}")


if __name__ == "__main__":
    run(main)

"""COrAL (Xie et al., 2024): predict several tokens ahead, reconstruct those behind, and refine a draft with both.

    python coral.py configs/coral_product.py                    train, stage after stage; the same command goes on
    python coral.py configs/coral_product.py --evaluate         exact answers, model calls and speed of each way to decode
    python coral.py configs/coral_sotu.py --offsets           loss and accuracy of each offset (paper, Figure 8)
    python coral.py configs/coral_sotu.py --text "We have "   watch a draft being refined, a line for each iteration

A causal Transformer whose last layer is told which position to predict: from source m, any target mu = m - k_b .. m + k_f. An offset
d = mu - m > 0 predicts, 1 being the next token; d <= 0 reconstructs a token that m has seen, as it should have been.

Here slot 0 is BOS and slot i is x_i. P is the length of the prompt, BOS included. From the bottom up: the layer (Section 2.3), the
losses (2.2), then of Section 3 prediction, candidates, verification, acceptance, and Algorithm 1, which calls them. Decoding is for
one sequence and without a cache, as theirs.
"""

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

import fast
from baselines import MLM
from model import GPT, Transformer, attend, rotary, rotate

STAGES = ("0", "1", "2a", "2b")

# ---------------------------------------------------------------- target-aware positions (paper, Section 2.3)


class TargetAware(Transformer):
    """A Transformer whose last layer looks from where its target stands. No new parts, but a head of its own (untied)."""

    def __init__(self, *size, **how):
        super().__init__(*size, **how)
        self.lm_head = torch.nn.Parameter(self.wte.weight.detach().clone())

    @property
    def head_weight(self):
        return self.lm_head

    def pairs(self, tokens, src, tgt, positions=None, allowed=None):
        """tokens (B, L), src and tgt (B, n): slots m, positions mu -> hidden (B, n, D): what m says of mu.

        Up to the last layer all is causal. There the query of m is turned to mu, and sees what m sees; whatever follows runs for
        each pair. positions (B, L) and allowed (B, L, L), if they are not causal, are for trees of candidates.
        """
        place, row = (torch.arange(n, device=tokens.device) for n in (tokens.size(1), len(tokens)))
        row = row[:, None]
        positions = place.expand_as(tokens) if positions is None else positions
        allowed = (place <= place[:, None]).expand(len(tokens), -1, -1) if allowed is None else allowed
        ropes, x = self.ropes(positions), self.drop(self.wte(tokens))
        *blocks, last = self.blocks
        for block in blocks:
            x = block(x, ropes, allowed)
        q, k, v = last.attn.project(last.ln_1(x))
        q, k = rotate(q[row, src], rotary(tgt, self.d)), rotate(k, ropes[1])
        y = attend(q, k, v, allowed[row, src], last.attn.dropout if self.training else 0.0)
        return self.ln_f(last.finish(x[row, src], last.attn.proj(y.flatten(-2))))


# ---------------------------------------------------------------- training (paper, Section 2.2 and 4)


def pairs_of(targets, offsets):
    """All (m, mu) with mu in targets (B, L) bool and mu - m in offsets -> src, tgt (B, n), padded; real (B, n) bool: no padding."""
    b, tgt = targets.nonzero().unbind(1)
    src = tgt[:, None] - torch.tensor(list(offsets), device=tgt.device)
    inside = (src >= 0) & (src < targets.size(1))
    b, tgt = (x[:, None].expand_as(src)[inside] for x in (b, tgt))
    found = torch.bincount(b, minlength=len(targets))
    real = torch.arange(int(found.max()), device=b.device) < found[:, None]
    src, tgt = (torch.zeros_like(real, dtype=torch.long).masked_scatter(real, x) for x in (src[inside], tgt))
    return src, tgt, real


def corrupt(tokens, response, granularity, ratio, generator, drawn=False):
    """Corrupt patches of the response, which is the end of each row: tokens, response (B, L) -> tokens, which are corrupt (B, L) bool.

    The response is cut into patches of `granularity` tokens; each is picked with probability `ratio`, one at least. A picked
    patch is overwritten, with a random one of this response or with its own first token over and over. drawn: for each row
    a granularity uniform on 1 .. granularity and a half-normal ratio of this mean (the authors' scripts). Where that leaves a patch as it
    was, it counts as corrupt all the same.
    """
    B, L = tokens.shape

    def random(n=L):
        return torch.rand(B, n, generator=generator, dtype=torch.float64)

    R = response.sum(1, keepdim=True)
    start, place = L - R, torch.arange(L)
    size = (1 + (random(1) * granularity).long()) if drawn else torch.full_like(R, granularity)
    share = torch.randn(B, 1, generator=generator).abs() * ratio * math.sqrt(math.pi / 2) if drawn else ratio
    n = (R + size - 1) // size  # patches of a row
    patch = (place - start).clamp(min=0) // size  # in which a token is; of keys to repeat, column j is patch j
    keys = random().masked_fill(place >= n, 2.0)
    picked = (keys < share) | (keys == keys.min(1, keepdim=True).values)
    other = (random() * (R // size).clamp(min=1)).long()  # a whole one
    repeat = random() < 0.5
    picked, other, repeat = (x.gather(1, patch) for x in (picked, other, repeat))  # from patches to their tokens
    taken = torch.where(repeat, patch * size, other * size + (place - start) % size) + start
    picked &= response
    return torch.where(picked, tokens.gather(1, taken.clamp(0, L - 1)), tokens), picked


class Coral(GPT):
    """Stage 0 trains the next token; 1 all offsets, in the last block and the head; 2a in all that 1 left out; 2b in everything.

    x_c is the prompt: a past, as for GPT. The loss counts tokens of the response, x_e.
    """

    settings = ("stage", "k_f", "k_b", "granularity", "ratio", "corruption")

    def __init__(self, body, bos, stage="2b", k_f=4, k_b=8, granularity=4, ratio=0.25, corruption="fixed"):
        super().__init__(body, bos)
        self.stage, self.forward_offsets, self.backward_offsets = stage, range(1, k_f + 1), range(-k_b, 1)
        self.noise = {"granularity": granularity, "ratio": ratio, "drawn": corruption == "drawn"}
        last = (f"blocks.{len(body.blocks) - 1}.", "ln_f.", "lm_head")
        for name, p in body.named_parameters():
            p.requires_grad_({"1": name.startswith(last), "2a": not name.startswith(last)}.get(stage, True))

    def trained_on(self, cond):
        return ~cond

    def slots(self, tokens):
        return F.pad(tokens, (1, 0), value=self.bos)

    def pairs(self, slots, src, tgt, positions=None, allowed=None):
        """body.pairs, on its device. Stage 0 predicts the next token as any GPT does: it looks from where m stands."""
        tgt = src if self.stage == "0" else tgt
        return self.body.pairs(*self.moved(slots, src, tgt), positions, allowed)

    def mean_nll(self, slots, labels, targets, offsets):
        """The mean over all pairs of -log p(labels[mu] | slots up to m)."""
        src, tgt, real = pairs_of(targets, offsets)
        hidden = self.pairs(slots, src, tgt)[self.moved(real)]
        labels = self.moved(labels.gather(1, tgt)[real])
        ones = torch.ones(labels.shape, device=hidden.device)
        return fast.SummedNLL.apply(self.body.head, self.body.head_weight, hidden, labels, ones) / len(labels)

    def training_loss(self, tokens, cond, generator=None):
        """(L_forward + L_backward) / 2, each a mean over its pairs in these sequences, times the number of tokens in the response."""
        clean, response = self.slots(tokens), F.pad(~cond, (1, 0))
        if self.stage == "0":
            return self.mean_nll(clean, clean, response, [1]) * response.sum(), response.sum()
        corrupted, where = corrupt(clean, response, generator=generator, **self.noise)
        ahead = self.mean_nll(clean, clean, response, self.forward_offsets)
        behind = self.mean_nll(corrupted, clean, where, self.backward_offsets)
        return (ahead + behind) / 2 * response.sum(), response.sum()

    def hidden(self, tokens, cond, scored, generator=None):
        """As a model of the next token: for evaluate.py and sample.py."""
        src, tgt, real = pairs_of(F.pad(scored, (1, 0)), [1])
        return self.pairs(self.slots(tokens), src, tgt)[self.moved(real)]

    generate = MLM.generate  # without a cache

    @torch.no_grad()
    def log_p(self, y, src, tgt, positions=None, allowed=None):
        """For decoding: y (L,), src, tgt (n,) -> (n, V) log p(. at tgt | what src sees), in float64 on the CPU."""
        more = [None if x is None else self.moved(x[None]) for x in (positions, allowed)]
        hidden = self.pairs(y[None], src[None], tgt[None], *more)[0]
        return self.body.head(hidden)[:, : self.body.vocab_size].cpu().double().log_softmax(-1)


# ---------------------------------------------------------------- prediction (paper, Section 3, Eq. 7)


@dataclass
class Decoder:
    """How to decode. `log_p` is Coral.log_p or has its form; without `backward` a draft is refined from its left side alone."""

    log_p: Callable
    eos: int
    max_len: int  # with the prompt
    k_f: int = 4
    k_b: int = 8
    backward: bool = True
    N: int = 4  # without verifier: for how many more iterations a token has to stay (paper: minimum refinement times)
    block: int = 64  # b
    verifier: bool = False
    epsilon: float = 0.2
    patience: int = 8  # iterations without progress (N more, without verifier) after which one token is accepted
    generator: torch.Generator | None = None  # of acceptance
    calls: int = field(default=0, init=False)

    @property
    def offsets(self):
        return torch.tensor([*(range(-self.k_b, 1) if self.backward else ()), *range(1, self.k_f + 1)])

    def ask(self, *query):
        self.calls += 1
        return self.log_p(*query)


def weight(d):
    """lambda(d) of Eq. 7, the code's, for the paper has none: 1 for the next token and for d = -2, less by e^-8 for each step ahead."""
    d = d.double()
    return torch.where(d > 0, (-8 * (d - 1)).exp(), (-(d + 2).abs() / 8).exp())


def predict(decoder, y, P, s, e, confidence):
    """log pi of positions s .. e (e - s + 1, V): the mean of what all sources m >= P - 1 say, by lambda(d) times the confidence in m, which
    is 1 + the smallest acceptance up to there.
    """
    tgt, d = torch.cartesian_prod(torch.arange(s, e + 1), decoder.offsets).unbind(1)
    there = (tgt - d >= P - 1) & (tgt - d < len(y))
    tgt, d = tgt[there], d[there]
    log_p = decoder.ask(torch.tensor(y), tgt - d, tgt)
    w = weight(d) * confidence[tgt - d]
    mean = log_p.new_zeros(e - s + 1, log_p.size(1)).index_add(0, tgt - s, w[:, None] * log_p)
    return (mean / w.new_zeros(e - s + 1).index_add(0, tgt - s, w)[:, None]).log_softmax(-1)


# ---------------------------------------------------------------- candidates and their verification (Appendix C, Eq. 8 and 9)


def upto_end(ids, eos):
    """A candidate ends with its first EOS."""
    return ids[: ids.index(eos) + 1] if eos in ids else ids


def candidates(log_pi, n_old, budget, eos):
    """The best candidates for a block, best first, as a trie -> token and parent of each node, and the nodes of each candidate.

    They are ranked by the product of p^(1 / gamma), gamma = 1.1, 1.2, 1.3 for the second to fourth new token. (Eq. 11 prints p / gamma,
    which is one factor for all.) One that EOS cuts short keeps the likeliest tokens behind it in its rank. Changing a candidate at its
    last changed position or later, by one rank, gives each of them once.
    """
    gamma = torch.tensor([1.0] * (n_old + 1) + [1.0 + 0.1 * i for i in range(1, len(log_pi))])[: len(log_pi), None]
    scores, ids = (x.tolist() for x in (log_pi / gamma.clamp(max=1.3)).topk(min(budget, log_pi.size(1))))
    nodes, tokens, parents, found = {}, [], [], []
    queue = [(-sum(row[0] for row in scores), (0,) * len(ids), 0)]
    while queue:
        cost, ranks, changed = heapq.heappop(queue)
        candidate, path, new = upto_end([row[r] for row, r in zip(ids, ranks)], eos), [], []
        for i in range(len(candidate)):
            name = tuple(candidate[: i + 1])
            path.append(nodes.get(name, len(tokens) + len(new)))
            new += [(name, path[i - 1] if i else -1)] * (name not in nodes)
        if len(tokens) + len(new) > budget:
            break
        for name, parent in new:
            nodes[name] = len(tokens)
            tokens.append(name[-1])
            parents.append(parent)
        found.append(path)
        for i in range(changed, len(candidate)):  # behind its end there is nothing to change
            if ranks[i] + 1 < len(ids[i]):
                step = scores[i][ranks[i]] - scores[i][ranks[i] + 1]
                heapq.heappush(queue, (cost + step, (*ranks[:i], ranks[i] + 1, *ranks[i + 1 :]), i))
    return tokens, parents, found


def tree(y, tokens, parents):
    """What is accepted and a trie behind it, for one pass: slots (L,), positions (L,), allowed (L, L): a node sees its ancestors."""
    s, L = len(y), len(y) + len(tokens)
    positions, allowed = torch.arange(L), torch.ones(L, L, dtype=torch.bool).tril()
    for i, parent in enumerate(parents, s):  # the parent -1 is the last slot of y
        allowed[i], positions[i] = allowed[s + parent], positions[s + parent] + 1
        allowed[i, i] = True
    return torch.tensor([*y, *tokens]), positions, allowed


def verify(decoder, y, P, s, log_pi):
    """Score all candidates for y[s:] in one pass -> the best of them, a list of tokens, and the acceptance of each token."""
    tokens, parents, found = candidates(log_pi, len(y) - s, 4 * decoder.block, decoder.eos)
    slots, positions, allowed = tree(y[:s], tokens, parents)
    offsets, sources = decoder.offsets, torch.arange(max(P - 1, s - decoder.k_f), len(slots))
    src, d = torch.cartesian_prod(sources, torch.arange(len(offsets))).unbind(1)
    tgt = positions[src] + offsets[d]
    inside = (tgt >= s) & (tgt < s + len(log_pi))
    src, d, tgt = src[inside], d[inside], tgt[inside]
    log_p = decoder.ask(slots, src, tgt, positions, allowed)
    entropy = -(log_p.exp() * log_p).sum(1)
    index = torch.full((len(slots), len(offsets)), -1)  # which row of log_p a slot and an offset have
    index[src, d] = torch.arange(len(src))

    def heard(nodes):
        """Of each token of a candidate (n, offsets): its log p by each source, is there one, and the entropy of its law."""
        path = torch.cat([torch.arange(s), torch.tensor(nodes) + s])  # the slot of each position
        m = torch.arange(s, len(path))[:, None] - offsets
        there = (m >= P - 1) & (m < len(path))
        row = index[path[m.clamp(0, len(path) - 1)], torch.arange(len(offsets))]
        said = log_p[row, slots[path[s:]][:, None]]
        return said.masked_fill(~there, 0.0), there, entropy[row]

    best = max(found, key=lambda nodes: verification(*heard(nodes)[:2], offsets).mean().item())
    return [tokens[i] for i in best], acceptance(*heard(best), offsets, decoder.epsilon)


def verification(said, there, offsets):
    """v + v_CD (Eq. 8 and 9) of each token: said (n, offsets) = log p(y_t) by each source, where there is one.

    v is a mean over the next-token prediction and the reconstructions, v_CD by what that prediction is better than those from further
    away. Their weights are the code's: lambda' = e^(d - 1), since by 1 / lambda the farthest alone would count.
    """

    def mean(w):
        w = w * there
        return (w * said).sum(1) / w.sum(1).clamp(min=1e-30)

    near = torch.where(offsets == 1, 1.0, (-(offsets + 2).abs().double()).exp()) * (offsets <= 1)
    far = (offsets - 1.0).double().exp() * (offsets >= 2)
    return mean(near) + (said[:, offsets == 1][:, 0] - mean(far)).clamp(min=0)  # no far ones: their mean is 0, this too


def acceptance(said, there, entropy, offsets, epsilon):
    """c of each token (Eq. 10): of its next-token prediction and its reconstructions, the share that finds it likely enough.

    (It prints epsilon exp(-H), whose minimum with epsilon is void; sqrt is the form of the rule that it cites, and the code's.)
    A source that is not there votes no: EOS, with nothing behind it, has 2 of the k_b + 2 votes at most.
    """
    near = offsets <= 1
    likely = said.exp() > (math.sqrt(epsilon) * (-entropy).exp()).clamp(max=epsilon)
    return (likely & there & near).sum(1) / near.sum()


# ---------------------------------------------------------------- sliding blockwise decoding (Algorithm 1)


def decode(decoder, prompt, watch=None):
    """Continue a prompt (a list of ids, BOS first) -> all tokens up to EOS or max_len, a list.

    Each iteration predicts anew all that is not accepted, with up to k_f tokens more. What is accepted never changes. With a verifier a
    token is accepted with probability c; without, when it stayed as it is for N more iterations. watch(y, s) is called after each.
    """
    y, P = list(prompt), len(prompt)
    s, stuck = P, 0  # the first position that is not accepted; iterations since the last was
    c, unchanged = torch.tensor([]), []  # of y[s:]: its acceptance; for how many iterations it is what it is
    while s < decoder.max_len and decoder.eos not in y[P:s]:
        e = min(s + decoder.block - 1, len(y) - 1 + decoder.k_f, decoder.max_len - 1)
        log_pi = predict(decoder, y, P, s, e, 1 + torch.cat([torch.ones(s), c]).cummin(0).values)
        if decoder.verifier:
            draft, c = verify(decoder, y, P, s, log_pi)
            accepted = (torch.rand(len(draft), generator=decoder.generator) < c).tolist()
        else:
            draft = upto_end(log_pi.argmax(-1).tolist(), decoder.eos)
            c = torch.ones(len(draft))
            before = [*zip(y[s:], unchanged), *[(None, 0)] * len(draft)]
            unchanged = [1 + k * (x == old) for x, (old, k) in zip(draft, before)]
            accepted = [k > decoder.N for k in unchanged]
        n = [*accepted, False].index(False)  # from the left
        stuck = 0 if n else stuck + 1
        if stuck >= decoder.patience + (0 if decoder.verifier else decoder.N):
            n, stuck = 1, 0
        y[s:], s, c, unchanged = draft, s + n, c[n:], unchanged[n:]
        if watch:
            watch(y, s)
    return y[:s]


def main(argv):
    import coral_runs  # training, tables and traces; it imports this file

    coral_runs.main(argv)


if __name__ == "__main__":
    from config import run

    run(main)

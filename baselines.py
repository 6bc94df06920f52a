"""The paper's baselines: sigma-GPT (temporal and random), a masked language model, masked diffusion.

They share the body, the score and the questions with AC-GPT; each class says what is different.

    python train.py configs/tiny.py --method=sigma_temporal
    python test_masks.py --show                                  who sees whom, which slot predicts what

This file draws no x_c and trains nothing itself.
"""

import torch
import torch.nn.functional as F

import fast
from model import ACGPT, GPT, ConditionalModel, rotary

# ---------------------------------------------------------------- sigma-GPT


def dual(positions, d):
    """Both positions in queries and keys: even frequencies turn by where a token stands, odd ones by what it predicts."""
    (cos, sin), (target_cos, target_sin) = (rotary(p, d) for p in positions.unbind(-1))
    odd = torch.arange(d // 2, device=positions.device) % 2 == 1
    rope = torch.where(odd, target_cos, cos), torch.where(odd, target_sin, sin)
    return rope, rope


def query(positions, d):
    """A key stands where its token does; a query looks from just before the token that it predicts.

    From left to right that is where its own token stands: the plain RoPE GPT.
    """
    own, target = positions.unbind(-1)
    return rotary(target - 1, d), rotary(own, d)


SIGMA_POSITIONS = {"dual": dual, "query": query}


class SigmaTemporal(ConditionalModel):
    """sigma-GPT (Pannatier et al., 2024) on [BOS | x_c | x_e], causal. A slot predicts the token of the next slot, and is told
    two positions: its own token's, and that of the token to predict. Here x_c and x_e each stand from left to right.
    """

    settings = ("sigma_positions",)

    def __init__(self, body, bos, sigma_positions="dual"):
        super().__init__(body, bos)
        body.ropes = lambda x: SIGMA_POSITIONS[sigma_positions](x, body.d)

    def order(self, cond, generator, scored=None):
        """-> (B, T): the places, 0 .. T - 1, of x_c, and then those of x_e."""
        place = torch.arange(cond.size(1), device=cond.device)
        return (place + cond.size(1) * ~cond).argsort(1)

    def in_order(self, tokens, order):
        """tokens and positions [BOS | the first T - 1 tokens in this order]; positions (B, T, 2): own, target."""
        target = order + 1
        own = F.pad(target[:, :-1], (1, 0))
        slots = F.pad(tokens.gather(1, order)[:, :-1], (1, 0), value=self.bos)
        return slots, torch.stack([own, target], -1), torch.ones_like(slots, dtype=torch.bool)

    def hidden(self, tokens, cond, scored, generator=None):
        order = self.order(cond, generator, scored)
        scored = scored.gather(1, order)
        place = (order + order.size(1) * torch.arange(len(order), device=order.device)[:, None])[scored]
        return self.states(*self.in_order(tokens, order), scored)[self.moved(place.argsort())]

    @torch.no_grad()
    def generate(self, tokens, cond, pick, generator=None, forced=None):
        order = self.order(cond, generator)
        keep = cond if forced is None else cond | forced
        tokens, keep = tokens.masked_fill(~keep, self.bos), keep.gather(1, order)
        filled = self.fill(*self.in_order(tokens, order), tokens.gather(1, order), keep, pick)
        return torch.empty_like(filled).scatter(1, self.moved(order), filled)


class SigmaRandom(SigmaTemporal):
    """sigma-GPT with x_c and x_e each shuffled; what of x_e is not scored comes before what is. Without a generator, from left
    to right, an order it is not trained on.
    """

    readings = (("left to right", 0), ("random order", 4))

    def order(self, cond, generator, scored=None):
        if generator is None:
            return super().order(cond, generator)
        keys = torch.rand(cond.shape, generator=generator, dtype=torch.float64) + ~cond
        return (keys if scored is None else keys + scored).argsort(1)


# ---------------------------------------------------------------- a masked language model


class MLM(ConditionalModel):
    """A bidirectional model that is trained to tell all of x_e from x_c, each token by itself."""

    one_pass = False

    def hidden(self, tokens, cond, scored, generator=None):
        """The slot of x_i predicts x_i, from x_c alone: x_e is masked."""
        B, L = tokens.size(0), tokens.size(1) + 1
        slots = F.pad(tokens.masked_fill(~cond, self.body.vocab_size), (1, 0), value=self.bos)  # MASK is one id further
        positions = torch.arange(L).expand(B, L)
        rows = F.pad(scored, (1, 0)).flatten().nonzero()[:, 0]
        return self.body(*self.moved(slots.flatten(), positions.flatten()), [(L, L)] * B, self.moved(rows))

    def exact_nll(self, tokens, cond, scored=None, generator=None):
        """One pass per token, in which x_c and all before it are known; as many at a time as there are sequences."""
        scored = ~cond if scored is None else scored
        place = torch.arange(cond.size(1))
        nll = fast.at_least_float32(self.body.head_weight.new_zeros(cond.shape))
        for b, t in zip(*(x.split(len(tokens)) for x in scored.nonzero().unbind(1))):
            alone = place == t[:, None]
            known = cond[b] | (place < t[:, None])
            nll[b, t] = super().exact_nll(tokens[b], known, alone).sum(1) if len(b) else 0.0
        return nll

    @torch.no_grad()
    def generate(self, tokens, cond, pick, generator=None, forced=None):
        keep = cond if forced is None else cond | forced
        tokens = tokens.masked_fill(~keep, self.bos)
        column = torch.arange(cond.size(1))
        for t in (~keep).any(0).nonzero()[:, 0].tolist():
            known = cond | (column < t)
            ids = pick(self.body.head(self.hidden(tokens, known, (column == t).expand_as(cond)))).cpu()
            tokens[:, t] = torch.where(keep[:, t], tokens[:, t], ids)
        return self.moved(tokens)


# ---------------------------------------------------------------- masked diffusion


class Diffusion(MLM):
    """Masked diffusion (Sahoo et al., 2024; Shi et al., 2024): absorbing MASK, alpha_t = 1 - t, no time input.

    It has no exact likelihood, only a bound: the NELBO. With k ~ U{1 .. |x_e|} random tokens of x_e masked, their mean NLL times
    |x_e| is one draw of it; of the same mean as the usual 1/t weight, and less variance.
    """

    readings = (("bound", 8),)
    bound = one_pass = True

    def corrupt(self, cond, generator):
        """-> masked (B, T) bool, and the weight (B, 1) of their NLLs."""
        n = (~cond).sum(1, keepdim=True)
        random = torch.rand(cond.size(0), cond.size(1) + 1, generator=generator, dtype=torch.float64)
        k = 1 + (random[:, :1] * n).long()
        return random[:, 1:].masked_fill(cond, 2.0).argsort(1).argsort(1) < k, n / k

    def training_loss(self, tokens, cond, generator=None):
        masked, weight = self.corrupt(cond, generator)
        return self.summed_nll(tokens, ~masked, masked, weight.expand(cond.shape), generator), (~cond).sum()

    def exact_nll(self, tokens, cond, scored=None, generator=None):
        raise ValueError("masked diffusion has no exact likelihood: `score` draws a bound")

    def score(self, tokens, cond, generator=None):
        masked, weight = self.corrupt(cond, generator)
        return ConditionalModel.exact_nll(self, tokens, ~masked, masked) * self.moved(weight)

    @torch.no_grad()
    def generate(self, tokens, cond, pick, generator=None, forced=None, steps=None):
        """From all of x_e masked, in `steps` (by default T) steps: in step s of s = steps .. 1 each masked slot opens with
        probability 1/s; those that open in one step are drawn independently of each other.
        """
        known = cond if forced is None else cond | forced
        for s in range(steps or cond.size(1), 0, -1):
            opens = ~known & (torch.rand(cond.shape, generator=generator, dtype=torch.float64) * s < 1)
            if opens.any():
                tokens = tokens.masked_scatter(opens, pick(self.body.head(self.hidden(tokens, known, opens))).cpu())
                known = known | opens
        return self.moved(tokens)


METHODS = {
    "gpt": GPT, "ac_gpt": ACGPT, "sigma_temporal": SigmaTemporal, "sigma_random": SigmaRandom, "mlm": MLM,
    "diffusion": Diffusion,
}  # fmt: skip

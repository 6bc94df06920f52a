"""A GPT that is told where each token stands and who may look at whom - and, with it, AC-GPT.

    Transformer       GPT-2 blocks with rotary positions. It knows nothing of conditioning: positions and mask are data.
    ConditionalModel  one score, log p(x_t | ...), behind training, evaluation and sampling alike.
    GPT, ACGPT        two methods, each a few lines: what its rows may see.

Shapes: B sequences, T body tokens, P prefix slots, L = P + T, V vocabulary, D width, H heads, d = D / H.
Nothing here reads files, knows a tokenizer or draws x_c. To train: python train.py configs/tiny.py
"""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F

import fast
from conditioning import augment

# ---------------------------------------------------------------- the Transformer


def rotary(positions, d, base=10000.0):
    """Cosines and sines of RoPE (Su et al., 2021): positions (..., L) -> two tensors (..., L, 1, d/2), always float32.

    bfloat16 would be too coarse: it merges half of the positions up to 1024.
    """
    frequency = base ** (-torch.arange(0, d, 2, device=positions.device, dtype=torch.float32) / d)
    angle = positions[..., None, None].float() * frequency
    return angle.cos(), angle.sin()


def rotate(x, rope):
    """Turn each pair (i, i + d/2) of x (..., L, H, d) by its angle."""
    cos, sin = rope
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).type_as(x)


def attend(q, k, v, allowed, dropout=0.0):
    """Attention: q, k, v (B, L, H, d) -> (B, L, H, d). allowed[b, q, k]: may slot q look at slot k?

    Or, for sequences that lie one behind the other: q, k, v (N, H, d), and allowed are their sizes.
    """
    if not isinstance(allowed, torch.Tensor):
        return fast.attend_packed(q, k, v, allowed, dropout)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, allowed[:, None], dropout).transpose(1, 2)


class Attention(nn.Module):
    def __init__(self, n_embd, n_head, dropout):
        super().__init__()
        self.n_head, self.dropout = n_head, dropout
        self.qkv = nn.Linear(n_embd, 3 * n_embd)
        self.proj = nn.Linear(n_embd, n_embd)

    def project(self, x):
        """x (..., L, D) -> q, k, v (..., L, H, d), not turned yet."""
        return self.qkv(x).unflatten(-1, (3, self.n_head, -1)).unbind(-3)

    def forward(self, x, ropes, allowed, rows, cache):
        q, k, v = self.project(x)
        q, k = rotate(q, ropes[0]), rotate(k, ropes[1])
        if cache is not None:
            k, v = cache.append(k, v)
        y = attend(q, k, v, allowed, self.dropout if self.training else 0.0)
        return self.proj(y[rows].flatten(-2))


class Block(nn.Module):
    """A pre-norm GPT-2 block."""

    def __init__(self, n_embd, n_head, dropout):
        super().__init__()
        self.ln_1 = nn.LayerNorm(n_embd)
        self.attn = Attention(n_embd, n_head, dropout)
        self.ln_2 = nn.LayerNorm(n_embd)
        self.fc = nn.Linear(n_embd, 4 * n_embd)
        self.proj = nn.Linear(4 * n_embd, n_embd)
        self.drop = nn.Dropout(dropout)

    def forward(self, x, ropes, allowed, rows=..., cache=None):
        return self.finish(x[rows], self.attn(self.ln_1(x), ropes, allowed, rows, cache))

    def finish(self, x, attended):
        x = x + self.drop(attended)
        return x + self.drop(self.proj(F.gelu(self.fc(self.ln_2(x)), approximate="tanh")))


class Transformer(nn.Module):
    """GPT-2 with RoPE: forward(tokens, positions, allowed) -> hidden; head(hidden) -> logits.

    `vocab_size` counts the ids that may be predicted: the tokenizer's. One more row embeds MASK (id = vocab_size), and
    the table is filled up to a multiple of 64, which GPUs like; none of these extra ids ever gets probability.
    """

    def __init__(self, vocab_size, n_layer, n_head, n_embd, dropout=0.0):
        super().__init__()
        self.vocab_size, self.d = vocab_size, n_embd // n_head
        self.wte = nn.Embedding(64 * math.ceil((vocab_size + 1) / 64), n_embd)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.ModuleList([Block(n_embd, n_head, dropout) for _ in range(n_layer)])
        self.ln_f = nn.LayerNorm(n_embd)
        for name, p in self.named_parameters():
            if p.dim() == 2:  # N(0, 0.02); the two projections back into the residual stream scaled down, as in GPT-2
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * n_layer) if name.endswith("proj.weight") else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(p)

    def forward(self, tokens, positions, allowed, rows=..., caches=None):
        """tokens (B, L), positions (B, L), allowed (B, L, L) bool -> hidden (B, L, D)[rows].

        allowed[b, q, k]: may slot q of sequence b look at slot k? `rows` is an index of the slots whose state is wanted:
        in the last block the others stop after the attention. For sequences that lie one behind the other,
        tokens and positions are (N,), and allowed is what `fast.attend_packed` calls sizes. With `caches`, one
        `fast.Cache` a block, the L slots continue those before, and allowed is (B, L, all so far).
        """
        ropes = self.ropes(positions)
        x = self.drop(self.wte(tokens))
        caches = caches or [None] * len(self.blocks)
        for block, cache in zip(self.blocks[:-1], caches):
            x = block(x, ropes, allowed, cache=cache)
        return self.ln_f(self.blocks[-1](x, ropes, allowed, rows, caches[-1]))

    def caches(self, L):
        """Empty caches for L slots, one a block."""
        return [fast.Cache(L) for _ in self.blocks]

    def ropes(self, positions):
        """The rotary angles of queries and of keys."""
        rope = rotary(positions, self.d)
        return rope, rope

    @property
    def head_weight(self):
        return self.wte.weight

    def head(self, hidden):
        """hidden (..., D) -> logits (..., V) with the input embedding as weights; V includes the filling, at -inf."""
        logits = F.linear(hidden, self.head_weight)
        logits[..., self.vocab_size :] = -torch.inf
        return logits


# ---------------------------------------------------------------- the methods


def ac_mask(present, P, queries=slice(None)):
    """present (B, P + T) -> allowed[b, q, k]: may slot q look at slot k? q in `queries`, k before their end.

    Causal, and every token sees the copies. Copies see all copies and nothing else: any other key comes after them.
    Why copies at all: if x_1 could look at the known x_3 in its place, where it has already seen x_2, then in the
    second layer x_1 would learn what x_2 is before predicting it.
    """
    slots = torch.arange(present.size(1), device=present.device)
    query, key = slots[queries, None], slots[: queries.stop]
    allowed = (key <= query) | (key < P)  # AC-GPT in one line
    padding = ~present[:, None, : queries.stop]  # sees itself alone, so that no row is without a key
    return allowed & ~(padding & (key != query))


class ConditionalModel(nn.Module):
    """p(x_e | x_c), token by token from left to right. A method says what stands where: `arrange`; the rest follows.

    `body` is a Transformer; `bos` is the id at position 0. In all of it tokens is (B, T) int, cond is (B, T) bool, True =
    known. Both belong on the CPU, whatever the body's device: asking a GPU how many are known makes it wait.
    """

    settings = ()  # keys of config.py that its constructor takes
    readings = (("", 0),)  # ways to score it: (name, random draws of which the mean is taken; 0: exact, left to right)
    bound = False  # is a score only an upper bound of the NLL?
    one_pass = True  # or does a score take a pass for each token?

    def __init__(self, body, bos):
        super().__init__()
        self.body, self.bos = body, bos

    def arrange(self, tokens, cond):
        """-> tokens, positions, present (B, P + T), as `augment` returns them: what the body sees."""
        raise NotImplementedError

    def hidden(self, tokens, cond, scored, generator=None):
        """-> (scored.sum(), D): the states that predict the tokens in `scored`, none of which depends on x_e from there on."""
        return self.states(*self.arrange(tokens, cond), scored)

    def states(self, tokens, positions, present, scored):
        """Of the last T slots those in `scored` (B, T), through the body -> (scored.sum(), D).

        The sequences go through it one behind the other, without their padding.
        """
        T = scored.size(1)
        sizes = [(L - T, L) for L in present.sum(1).tolist()]
        rows = F.pad(scored, (tokens.size(1) - T, 0))[present].nonzero()[:, 0]
        tokens, positions, rows = self.moved(tokens[present], positions[present], rows)
        return self.body(tokens, positions, sizes, rows)

    def score(self, tokens, cond, generator=None):
        """What evaluation sums up, (B, T), 0 for known tokens: exact_nll, or a random draw of it or of its bound."""
        return self.exact_nll(tokens, cond, generator=generator)

    def can_condition_on(self, cond):
        """Has the method a p(x_e | x_c) for these x_c at all?"""
        return True

    def logits(self, tokens, cond):
        """-> (B, T, V): predictions of x_1 .. x_T, each given x_c and the tokens before it (of MLM: given x_c)."""
        return self.body.head(self.hidden(tokens, cond, torch.ones_like(cond))).unflatten(0, cond.shape)

    def exact_nll(self, tokens, cond, scored=None, generator=None):
        """-log p(x_t | x_c, earlier tokens) in nats, (B, T), 0 outside `scored` (B, T) bool, by default all of x_e.

        Its sum over x_e is -log p(x_e | x_c). Only the scored rows go through the vocabulary head. ValueError for x_c
        that the method cannot condition on.
        """
        if not self.can_condition_on(cond):
            raise ValueError(
                f"{type(self).__name__} has no p(x_e | x_c) for such x_c: leave it empty and pass `scored`"
            )
        scored = ~cond if scored is None else scored
        hidden, targets = self.hidden(tokens, cond, scored, generator), self.moved(tokens[scored])
        parts = zip(hidden.split(fast.ROWS), targets.split(fast.ROWS))
        logits = ((fast.at_least_float32(self.body.head(h)), x) for h, x in parts)
        nll = torch.cat([F.cross_entropy(*pair, reduction="none") for pair in logits])
        return nll.new_zeros(cond.shape).masked_scatter(self.moved(scored), nll)

    def trained_on(self, cond):
        """-> (B, T) bool: the tokens whose loss is trained."""
        return ~cond

    def training_loss(self, tokens, cond, generator=None):
        """-> (sum of NLL over the trained tokens, in nats; their number)."""
        scored = self.trained_on(cond)
        loss = self.summed_nll(tokens, cond, scored, torch.ones(cond.shape, device=cond.device), generator)
        return loss, scored.sum()

    def summed_nll(self, tokens, cond, scored, scale, generator):
        """The sum of scale * NLL over `scored`, both (B, T)."""
        hidden = self.hidden(tokens, cond, scored, generator)
        targets, scale = self.moved(tokens[scored], scale[scored])
        return fast.SummedNLL.apply(self.body.head, self.body.head_weight, hidden, targets, scale)

    def forward(self, *args):
        """training_loss, so that DistributedDataParallel can wrap it."""
        return self.training_loss(*args)

    @torch.no_grad()
    def generate(self, tokens, cond, pick, generator=None, forced=None):
        """Fill every unknown token from left to right -> (B, T). pick: logits (B, V) -> ids (B,).

        `forced` (B, T) bool, by default cond: tokens that are kept as they are. Those outside cond are not in x_c, so
        they inform only what comes after them (the no-future modes). `generator` is for methods with a random order.
        The slots up to the first unknown token go through the body at once, then those up to the next one, and so on.
        """
        keep = cond if forced is None else cond | forced
        tokens = tokens.masked_fill(~keep, self.bos)
        return self.fill(*self.arrange(tokens, cond), tokens, keep, pick)

    def fill(self, slots, positions, present, tokens, keep, pick):
        """Of the last T slots each predicts a token (B, T), which goes into the next slot; those in `keep` stay."""
        slots, positions, present = self.moved(slots, positions, present)
        P = slots.size(1) - tokens.size(1)
        caches = self.body.caches(slots.size(1))
        start, tokens, kept = 0, *self.moved(tokens, keep)
        for t in (~keep).any(0).nonzero()[:, 0].tolist():
            new = slice(start, P + t + 1)  # the last of them predicts x_{t+1}
            allowed = ac_mask(present, P, new)
            hidden = self.body(slots[:, new], positions[:, new], allowed, (slice(None), -1), caches)
            tokens[:, t] = torch.where(kept[:, t], tokens[:, t], pick(self.body.head(hidden)))
            slots[:, P + 1 :] = tokens[:, :-1]
            start = new.stop
        return tokens

    def moved(self, *tensors):
        """Tensors to the body's device, without making a GPU wait."""
        device = next(self.parameters()).device
        if device.type == "cuda":
            tensors = [x if x.is_cuda else x.contiguous().pin_memory() for x in tensors]
        tensors = [x.to(device, non_blocking=device.type == "cuda") for x in tensors]
        return tensors if len(tensors) > 1 else tensors[0]


class GPT(ConditionalModel):
    """The plain causal model. It ignores x_c in training, and learns all T tokens."""

    def arrange(self, tokens, cond):
        return augment(tokens, torch.zeros_like(cond), self.bos)

    def can_condition_on(self, cond):
        """GPT knows the past alone: no known token may follow an unknown one."""
        return not (cond & ((~cond).cumsum(1) > 0)).any()

    def trained_on(self, cond):
        return torch.ones_like(cond)


class ACGPT(ConditionalModel):
    """Arbitrary Conditionals GPT: copies of x_c stand in front, at their own positions, and everybody sees them."""

    def arrange(self, tokens, cond):
        return augment(tokens, cond, self.bos)

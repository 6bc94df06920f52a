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

from conditioning import augment

# ---------------------------------------------------------------- the Transformer


def rotary(positions, d, base=10000.0):
    """Cosines and sines of RoPE (Su et al., 2021): positions (B, L) -> two tensors (B, 1, L, d/2), always float32.

    bfloat16 would be too coarse: it merges half of the positions up to 1024.
    """
    frequency = base ** (-torch.arange(0, d, 2, device=positions.device, dtype=torch.float32) / d)
    angle = positions[:, None, :, None].float() * frequency
    return angle.cos(), angle.sin()


def rotate(x, rope):
    """Turn each pair (i, i + d/2) of x (B, H, L, d) by its angle."""
    cos, sin = rope
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).type_as(x)


class Attention(nn.Module):
    def __init__(self, n_embd, n_head, dropout):
        super().__init__()
        self.n_head, self.dropout = n_head, dropout
        self.qkv = nn.Linear(n_embd, 3 * n_embd)
        self.proj = nn.Linear(n_embd, n_embd)

    def forward(self, x, rope, allowed):
        B, L, D = x.shape
        q, k, v = self.qkv(x).view(B, L, 3, self.n_head, D // self.n_head).permute(2, 0, 3, 1, 4)  # (B, H, L, d) each
        y = F.scaled_dot_product_attention(
            rotate(q, rope), rotate(k, rope), v,
            attn_mask=None if allowed is None else allowed[:, None],
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=allowed is None,
        )  # fmt: skip
        return self.proj(y.transpose(1, 2).reshape(B, L, D))


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

    def forward(self, x, rope, allowed):
        x = x + self.drop(self.attn(self.ln_1(x), rope, allowed))
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

    def forward(self, tokens, positions, allowed=None):
        """tokens (B, L), positions (B, L), allowed (B, L, L) bool or None for causal -> hidden (B, L, D).

        allowed[b, q, k]: may token q of sequence b look at token k?
        """
        rope = rotary(positions, self.d)
        x = self.drop(self.wte(tokens))
        for block in self.blocks:
            x = block(x, rope, allowed)
        return self.ln_f(x)

    def head(self, hidden):
        """hidden (..., D) -> logits (..., V) with the input embedding as weights; V includes the filling, at -inf."""
        logits = F.linear(hidden, self.wte.weight)
        logits[..., self.vocab_size :] = -torch.inf
        return logits


# ---------------------------------------------------------------- the methods


class ConditionalModel(nn.Module):
    """p(x_e | x_c), token by token from left to right. A method says what its rows see: `hidden`; the rest follows.

    `body` is a Transformer, or anything with its forward, head and vocab_size; `bos` is the id at position 0.
    In all of it tokens is (B, T) int, cond is (B, T) bool, True = known.
    """

    def __init__(self, body, bos):
        super().__init__()
        self.body, self.bos = body, bos

    def hidden(self, tokens, cond):
        """-> (B, T, D): the states that predict x_1 .. x_T; none may depend on its own or later tokens of x_e."""
        raise NotImplementedError

    def can_condition_on(self, cond):
        """Has the method a p(x_e | x_c) for these x_c at all?"""
        return True

    def logits(self, tokens, cond):
        """-> (B, T, V): predictions of x_1 .. x_T, each given x_c and the tokens before it."""
        return self.body.head(self.hidden(tokens, cond))

    def exact_nll(self, tokens, cond, scored=None):
        """-log p(x_t | x_c, earlier tokens) in nats, (B, T), 0 outside `scored` (B, T) bool, by default all of x_e.

        Its sum over x_e is -log p(x_e | x_c). Only the scored rows go through the vocabulary head. ValueError for x_c
        that the method cannot condition on.
        """
        if not self.can_condition_on(cond):
            raise ValueError(
                f"{type(self).__name__} has no p(x_e | x_c) for such x_c: leave it empty and pass `scored`"
            )
        scored = ~cond if scored is None else scored
        logits = self.body.head(self.hidden(tokens, cond)[scored])
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        nll = F.cross_entropy(logits, tokens[scored].long(), reduction="none")
        return torch.zeros(tokens.shape, dtype=nll.dtype, device=nll.device).masked_scatter(scored, nll)

    def trained_on(self, cond):
        """-> (B, T) bool: the tokens whose loss is trained."""
        return ~cond

    def training_loss(self, tokens, cond):
        """-> (sum of NLL over the trained tokens, in nats; their number)."""
        scored = self.trained_on(cond)  # & ~scored below: what is learnt is not known; it empties GPT's x_c
        return self.exact_nll(tokens, cond & ~scored, scored).sum(), scored.sum()

    def forward(self, tokens, cond):
        """training_loss, so that DistributedDataParallel can wrap it."""
        return self.training_loss(tokens, cond)

    @torch.no_grad()
    def generate(self, tokens, cond, pick, generator=None, forced=None):
        """Fill every unknown token from left to right -> (B, T). pick: logits (B, V) -> ids (B,).

        `forced` (B, T) bool, by default cond: tokens that are kept as they are. Those outside cond are not in x_c, so
        they inform only what comes after them (the no-future modes). `generator` is for methods with a random order.
        """
        keep = cond if forced is None else cond | forced
        tokens = tokens.masked_fill(~keep, self.bos)
        for t in range(tokens.size(1)):
            if not keep[:, t].all():
                ids = pick(self.body.head(self.hidden(tokens, cond)[:, t]))
                tokens[:, t] = torch.where(keep[:, t], tokens[:, t], ids)
        return tokens


class GPT(ConditionalModel):
    """The plain causal model. It ignores x_c in training, and learns all T tokens."""

    def hidden(self, tokens, cond):
        tokens, positions, _ = augment(tokens, torch.zeros_like(cond), self.bos)
        return self.body(tokens, positions)

    def can_condition_on(self, cond):
        """GPT knows the past alone: no known token may follow an unknown one."""
        return not (cond & ((~cond).cumsum(1) > 0)).any()

    def trained_on(self, cond):
        return torch.ones_like(cond)


class ACGPT(ConditionalModel):
    """Arbitrary Conditionals GPT: copies of x_c stand in front, at their own positions, and everybody sees them."""

    def hidden(self, tokens, cond):
        T = tokens.size(1)
        tokens, positions, n_copies = augment(tokens, cond, self.bos)
        return self.body(tokens, positions, ac_mask(n_copies, tokens.size(1) - T, T))[:, -T:]


def ac_mask(n_copies, P, T):
    """n_copies (B,) -> allowed (B, P + T, P + T) bool; allowed[b, q, k]: may token q look at token k?

    Causal, and every token sees the copies. Copies see all copies and nothing else: any other key comes after them.
    Why copies at all: if x_1 could look at the known x_3 in its place, where it has already seen x_2, then in the
    second layer x_1 would learn what x_2 is before predicting it.
    """
    query = torch.arange(P + T, device=n_copies.device)[:, None]
    key = torch.arange(P + T, device=n_copies.device)
    allowed = (key <= query) | (key < P)  # AC-GPT in one line
    padding = (key >= n_copies[:, None, None]) & (key < P)  # sees itself too, so that no row is without a key
    return allowed & ~(padding & (key != query))


METHODS = {"gpt": GPT, "ac_gpt": ACGPT}

"""Shortcuts behind model.py. They change what a step costs and nothing that it computes.

    attend_packed   attention without a mask and without padding, for sequences that lie one behind the other
    SummedNLL       the training loss without all the logits at once
    Cache           the keys and values of the tokens so far, for sampling
    compile_body    torch.compile for batches that all have other sizes

and on import, for the whole process: numbers below 1e-38, as in the tails of a softmax, become 0 on a CPU, which computes with them
at a fraction of its speed (sigma-GPT in random order: half).

To understand the method you can do without this file; test_masks.py holds each shortcut against plain code, and
`python bench.py` measures what they save.
"""

import itertools

import torch
import torch.nn.functional as F

torch.set_flush_denormal(True)  # before there are other threads: they take it over from this one


def attend_packed(q, k, v, sizes, dropout=0.0):
    """What ac_mask allows, without a mask: q, k, v (N, H, d), the slots of all sequences one behind the other.

    sizes: [(P, L)] of each sequence, copies and slots in all. The body is causal, with the copies before it; that call
    computes causal rows for the copies too, but copies see all copies: theirs are replaced by full attention. Neighbours
    of equal sizes share a call. Neither call has a mask, so FlashAttention takes them.
    """
    groups = [(P, L, len(list(group))) for (P, L), group in itertools.groupby(sizes)]
    qkv_of_groups = zip(*(x.split([n * L for _, L, n in groups]) for x in (q, k, v)))
    y = []
    for (P, L, n), qkv in zip(groups, qkv_of_groups):
        q, k, v = (x.unflatten(0, (n, L)).transpose(1, 2) for x in qkv)  # (n, H, L, d)
        if P < L:
            mixed = F.scaled_dot_product_attention(q, k, v, None, dropout, is_causal=True)
        if P > 0:
            copies = F.scaled_dot_product_attention(q[:, :, :P], k[:, :, :P], v[:, :, :P], None, dropout)
            mixed = torch.cat([copies, mixed[:, :, P:]], 2) if P < L else copies
        y.append(mixed.transpose(1, 2).flatten(0, 1))
    return torch.cat(y)


ROWS = 1024  # so many rows of logits exist at a time


class SummedNLL(torch.autograd.Function):
    """The sum of scale * -log p(targets) in nats: hidden (n, D), targets (n,), scale (n,) -> scalar, float32 or better.

    head(hidden) are the logits, weight (V, D) the matrix by which it makes them. Their gradient, softmax - one-hot, is
    carried back at once, ROWS rows at a time.
    """

    @staticmethod
    def forward(ctx, head, weight, hidden, targets, scale):
        total, d_hidden = 0.0, torch.empty_like(hidden)
        d_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None  # it may be frozen
        for i in range(0, len(hidden), ROWS):
            h, x, s = hidden[i : i + ROWS], targets[i : i + ROWS, None], scale[i : i + ROWS, None]
            log_p = at_least_float32(head(h)).log_softmax(-1)
            total -= (s * log_p.gather(1, x)).sum()
            if ctx.needs_input_grad[2]:  # not when validating
                d_logits = log_p.exp_().scatter_add_(1, x, -torch.ones_like(x, dtype=log_p.dtype))
                d_logits = d_logits.mul_(s).to(weight.dtype)
                d_hidden[i : i + ROWS] = d_logits @ weight
                if d_weight is not None:
                    d_weight += d_logits.T @ h
        ctx.save_for_backward(d_weight, d_hidden)
        return total

    @staticmethod
    def backward(ctx, grad):
        d_weight, d_hidden = ctx.saved_tensors
        return None, d_weight if d_weight is None else d_weight.mul_(grad), d_hidden.mul_(grad), None, None


def at_least_float32(x):
    return x.to(torch.promote_types(x.dtype, torch.float32))


class Cache:
    """The keys and values that one attention layer has computed: two tensors (B, L, H, d), filled from the left."""

    def __init__(self, L):
        self.L, self.n = L, 0

    def append(self, k, v):
        """Add those of l new slots, (B, l, H, d), and return all so far."""
        if self.n == 0:
            self.k, self.v = (x.new_empty(x.size(0), self.L, *x.shape[2:]) for x in (k, v))
        new = slice(self.n, self.n + k.size(1))
        self.k[:, new], self.v[:, new], self.n = k, v, new.stop
        return self.k[:, : self.n], self.v[:, : self.n]


def compile_body(body, **how):
    """torch.compile a Transformer, around its attention: that one is a fused kernel already, of other sizes each time."""
    global attend_packed
    torch._dynamo.config.fail_on_recompile_limit_hit = True  # rather than going on uncompiled without a word
    attend_packed = torch.compiler.disable(attend_packed)
    body.compile(dynamic=True, **how)

"""The paper's Medium model (203M, not GPT-2 medium) on WikiText-103: with --r_max=0.2 .. 1.0 the AC-GPT rows of Table B.3.

First: python prepare_data.py wikitext103
Needs, estimated from FLOPs (3.6e18, at 40% of the card's peak): A100 8 hours; about 14 GB on the card.
"""

dataset = "wikitext103"
tokenizer = "gpt2"
n_layer = 12
n_head = 16
n_embd = 1024

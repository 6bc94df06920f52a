"""The paper's Base model (124M) on WikiText-103: with --r_max=0.2 .. 1.0 the AC-GPT rows of Table B.2.

First: python prepare_data.py wikitext103
Needs, estimated from FLOPs (2.2e18, at 40% of the card's peak): A100 5 hours; about 10 GB on the card.
"""

dataset = "wikitext103"
tokenizer = "gpt2"
n_layer = 12

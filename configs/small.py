"""The paper's Small model (81M) on WikiText-103: with --r_max=0.2 .. 1.0 the AC-GPT rows of Table B.1.

First: python prepare_data.py wikitext103
Needs, estimated from FLOPs (1.3e18, at 40% of the card's peak): A100 3 hours, T4 14 hours; about 6 GB on the card.
The defaults of config.py are this model and its recipe: 18,200 steps of 128 x 1024 tokens, 20 epochs.
"""

dataset = "wikitext103"
tokenizer = "gpt2"

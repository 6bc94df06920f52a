"""The Base model (124M) on about 1B tokens of FineWeb, r_max 0.4: the AC-GPT row of Table B.4.

First: python prepare_data.py fineweb (streams about 5 GB, writes 2 GB)
Needs, estimated from FLOPs (2.1e18, at 40% of the card's peak): A100 5 hours; about 9 GB on the card.
The paper does not say how long it trained here: these are as many steps as on WikiText-103, 2.4 epochs.
"""

dataset = "fineweb"
tokenizer = "gpt2"
r_max = 0.4
n_layer = 12
eval_sequences = 1000

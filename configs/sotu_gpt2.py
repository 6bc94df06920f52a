"""State of the Union messages as GPT-2 BPE, a 30M-parameter model for one small GPU. Reproduces no table.

First: python prepare_data.py sotu --tokenizer=gpt2
Needs, estimated from FLOPs (2.8e15): a T4 five minutes, validation included; about 2 GB on the card. It has 1.9M tokens
only, so it overfits: best.pt, not the last step, is what counts.
"""

tokenizer = "gpt2"
block_size = 256
n_head = 6
n_embd = 384
dropout = 0.2
batch_size = 16
gradient_accumulation_steps = 2
learning_rate = 1e-3
warmup_iters = 100
max_iters = 2000
eval_interval = 200
eval_sequences = 400

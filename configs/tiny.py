"""State of the Union messages as bytes, a 0.8M-parameter model: eight minutes on two CPU cores, and the comparison of all
methods by reproduce.py. `make demo` takes 2,600 steps, five minutes.
"""

block_size = 256
n_layer = 4
n_head = 4
n_embd = 128
dropout = 0.0

batch_size = 4
gradient_accumulation_steps = 1
learning_rate = 4e-3
warmup_iters = 50
beta2 = 0.99
max_iters = 4600

eval_interval = 650
eval_sequences = 400
log_interval = 50

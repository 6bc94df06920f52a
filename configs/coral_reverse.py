"""COrAL on a task without any thought (tasks.py): 64 letters, then the same in reverse."""

method = "coral"
dataset = "reverse"
block_size = 129
law = "prompt"
prompt_length = 64
r_max = 0.0

n_layer = 4
n_head = 4
n_embd = 112
dropout = 0.0

batch_size = 32
gradient_accumulation_steps = 1
learning_rate = 1e-3
warmup_iters = 100
beta2 = 0.99
max_iters = 2000

eval_sequences = 500
log_interval = 50

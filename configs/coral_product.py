"""COrAL on answers that begin with their result (tasks.py). Two layers, 0.4M parameters; each of the four stages has max_iters steps."""

method = "coral"
dataset = "product"
block_size = 29
law = "prompt"
prompt_length = 16
r_max = 0.0

n_layer = 2
n_head = 4
n_embd = 112
dropout = 0.0

batch_size = 64
gradient_accumulation_steps = 1
learning_rate = 1e-3
warmup_iters = 50
beta2 = 0.99
max_iters = 1500

eval_interval = 250
eval_sequences = 1000
log_interval = 50

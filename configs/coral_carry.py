"""COrAL on additions (tasks.py): 24 column sums, then the digits. A 0.7M-parameter model; each of the four stages has max_iters steps."""

method = "coral"
dataset = "carry"
block_size = 50
law = "prompt"
prompt_length = 24
r_max = 0.0

n_layer = 4
n_head = 4
n_embd = 112
dropout = 0.0

batch_size = 64
gradient_accumulation_steps = 1
learning_rate = 1e-3
warmup_iters = 50
beta2 = 0.99
max_iters = 400

eval_interval = 100
eval_sequences = 1000
log_interval = 20

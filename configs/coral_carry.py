"""COrAL on sums that are written from their end (tasks.py): 24 columns, then the digits. 0.7M parameters; each of the four stages has max_iters steps."""

method = "coral"
dataset = "carry"
block_size = 49
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
warmup_iters = 100
beta2 = 0.99
max_iters = 1000

eval_interval = 250
eval_sequences = 1000
log_interval = 50

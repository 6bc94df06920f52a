"""COrAL on State of the Union messages, byte by byte, the model of configs/tiny.py."""

method = "coral"
block_size = 256
law = "prompt"
prompt_length = 16
r_max = 0.0

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
eval_sequences = 200
log_interval = 50

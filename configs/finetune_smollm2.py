"""SmolLM2-135M on State of the Union messages, LoRA: 1.2 seconds a step on two CPU cores with AMX (40 minutes), AC-GPT 1.8 (an hour)."""

tokenizer = "hf:models/smollm2"
llm = "models/smollm2"
block_size = 128

dropout = 0.0
lora_rank = 8
lora_alpha = 16.0
dtype = "bfloat16"  # a CPU without matrix units (lscpu names amx_bf16) is faster with --dtype=float32: 2.5 to 3 seconds

batch_size = 4
gradient_accumulation_steps = 1
learning_rate = 3e-4
warmup_iters = 100
weight_decay = 0.0
max_iters = 2000

eval_interval = 250
eval_sequences = 200

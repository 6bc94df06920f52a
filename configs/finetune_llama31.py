"""Llama-3.1-8B on WikiText-103, LoRA of rank 64: Table C.1 of the paper. One GPU of 40 GB (estimate); the weights need Meta's licence."""

dataset = "wikitext103"
tokenizer = "hf:meta-llama/Llama-3.1-8B"
llm = "meta-llama/Llama-3.1-8B"

dropout = 0.0
lora_rank = 64
lora_alpha = 128.0
gradient_checkpointing = True

batch_size = 4
gradient_accumulation_steps = 8
learning_rate = 2e-4
warmup_iters = 100
weight_decay = 0.0
max_iters = 2000

eval_interval = 250
eval_sequences = 200

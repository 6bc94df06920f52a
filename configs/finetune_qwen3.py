"""Qwen3-1.7B on WikiText-103, LoRA of rank 8: Figure C.1 of the paper; --llm=Qwen/Qwen3-8B, 14B, 32B: Table C.1. One GPU of 24 GB (estimate)."""

dataset = "wikitext103"
tokenizer = "hf:Qwen/Qwen3-1.7B"
llm = "Qwen/Qwen3-1.7B"

dropout = 0.0
lora_rank = 8
lora_alpha = 16.0
gradient_checkpointing = True

batch_size = 4
gradient_accumulation_steps = 8
learning_rate = 2e-4
warmup_iters = 100
weight_decay = 0.0
max_iters = 2000

eval_interval = 250
eval_sequences = 200

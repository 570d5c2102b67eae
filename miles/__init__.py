"""Miles: reinforcement learning post-training of language models, with SGLang engines, a Megatron trainer and Ray."""

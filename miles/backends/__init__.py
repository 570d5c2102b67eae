"""Adapters to the programs that do the heavy work: Megatron (training) and SGLang (generation)."""

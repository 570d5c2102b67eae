"""The Megatron-core trainer: model building, process groups, training steps, checkpoints, CPU support."""

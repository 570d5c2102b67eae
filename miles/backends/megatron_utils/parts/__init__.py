"""Layer parts that families put into Megatron's local layers: norms, rotary positions, attention, layer specs."""

"""Llama 2, 3, 3.1, 3.2 and models of the same architecture (SmolLM2)."""

from miles.backends.megatron_utils.families.base import Family


class Llama(Family):
    """Plain attention, gated MLP, optional llama3 rope scaling."""

    architectures = ("LlamaForCausalLM",)

    def allowed_values(self) -> dict[str, tuple]:
        # pretraining_tp > 1 makes Hugging Face cut its matrix products into slices, an old way of reproducing training.
        return {**super().allowed_values(), "mlp_bias": (False, None), "pretraining_tp": (1, None)}

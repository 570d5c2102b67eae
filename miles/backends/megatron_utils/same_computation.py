"""Whether the weights of one checkpoint can take the place of another's in its model."""

from transformers import PreTrainedConfig

from miles.backends.megatron_utils.families import family_for
from miles.utils.errors import UserError


def check_same_computation(flag: str, folder: str, own: PreTrainedConfig, other: PreTrainedConfig) -> None:
    """Raise ValueError naming what differs, unless `other`'s weights can be swapped into a model of `own`.

    Sizes alone do not tell: with another rope theta or norm epsilon the weights fit, and compute something else.

    Args:
        flag, folder: what the user gave.
        own, other: the configuration of --hf-checkpoint, and that in `folder`.
    """
    ours, theirs = _computation(own), _computation(other)
    different = sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))
    if different:
        raise UserError(
            f"the model in {folder} ({flag}) computes otherwise than the one in --hf-checkpoint: they differ in "
            f"{', '.join(different)}; its weights take the other's place in one model, so choose one of the same "
            "architecture"
        )


def _computation(hf_config: PreTrainedConfig) -> dict[str, object]:
    """What a forward pass depends on besides weights."""
    family = family_for(hf_config)
    # Functions follow from the family; some are made anew each time.
    fields = {name: value for name, value in family.transformer_config(hf_config).items() if not callable(value)}
    ropes = {
        name: (rope.inv_freq_R.tolist(), rope.scale, rope.interleaved) for name, rope in family.ropes(hf_config).items()
    }
    layers = [family.attention_options(hf_config, layer) for layer in range(hf_config.num_hidden_layers)]
    return fields | {"family": type(family), "ropes": ropes, "attention": layers, "vocab_size": hf_config.vocab_size}

"""Models whose weights take the place of the trained one's for a forward pass."""

from collections.abc import Iterator

from miles.config.values import Values
from miles.hf.quantization import quantization_in, quantization_problem
from miles.hf.shape import model_shape

# Of config.json: what weights must agree in for one model to hold them.
SHAPE = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
)


def unread_weights(flag: str, folder: str) -> Iterator[str]:
    """That the trainer does not read weights quantised as those in a folder."""
    if problem := quantization_problem(quantization_in(folder)):
        yield f"{flag} {folder}: {problem}"


def shape_differences(v: Values, flag: str, folder: str) -> Iterator[str]:
    """In what the model in a folder is shaped unlike the trained one; nothing where a config.json can't be read."""
    trained, other = model_shape(v.hf_checkpoint), model_shape(folder)
    if trained is None or other is None:
        return
    for name in SHAPE:
        if trained.get(name) != other.get(name):
            yield (
                f"{flag} {folder} has {name} {other.get(name)} and --hf-checkpoint {trained.get(name)}: its weights "
                "are swapped in for the model's, so that both need one architecture"
            )

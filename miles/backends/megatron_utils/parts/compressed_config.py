"""What a DeepSeek-V4 has besides what Megatron's configuration knows."""

from dataclasses import dataclass

from megatron.core.transformer.transformer_config import TransformerConfig


@dataclass(frozen=True)
class Compression:
    """How a layer's tokens are compressed.

    Args:
        ratio: tokens to an entry.
        overlap: an entry also sees the tokens of the one before it.
        topk: an indexer picks so many entries for each query; None: a query sees all.
    """

    ratio: int
    overlap: bool = False
    topk: int | None = None


@dataclass
class CompressedConfig(TransformerConfig):
    """Megatron's configuration, and the fields of a model with compressed attention and hyper-connections.

    Args:
        hyper_streams: residual streams.
        hyper_iterations: how often rows and columns of the mix of streams are made one.
        hyper_epsilon: added to shares and sums there.
        q_lora_rank: width of the latent of queries.
        output_groups: groups of heads, each with an output projection of its own into `output_rank` numbers.
        attention_window: tokens that a query sees besides entries.
        index_heads, index_size: heads of the indexer, and their size.
        compressions: of each layer; None: a window of tokens only.
        hash_layers: of each layer, whether a table says the experts of each token id.
    """

    hyper_streams: int = 4
    hyper_iterations: int = 20
    hyper_epsilon: float = 1e-6
    q_lora_rank: int = 1024
    output_groups: int = 8
    output_rank: int = 1024
    attention_window: int = 128
    index_heads: int = 64
    index_size: int = 128
    compressions: tuple[Compression | None, ...] = ()
    hash_layers: tuple[bool, ...] = ()

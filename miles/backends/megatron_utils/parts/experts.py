"""The experts of a rank as one module: their weights in one parameter a projection, computed as grouped products.

Shape letters: E experts of this rank, T rows in the order of their experts, H hidden channels, F an expert's inner ones
(this rank's part of them under expert tensor parallelism), O and I a projection's outputs and inputs.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

from miles.backends.megatron_utils.parts.grouped import Groups, grouped_bias, grouped_linear


class ExpertLinear(torch.nn.Module):
    """One projection of all experts of a rank.

    Args:
        experts: E.
        outputs, inputs: the sizes of this rank's part, O and I.
        cut: the dimension of an expert's weight [O, I] that expert tensor parallelism cuts.
        config: of the model.

    Attributes:
        weight: [E, O, I]. bias: [E, O], or None.
    """

    bias: torch.nn.Parameter | None

    def __init__(self, experts: int, outputs: int, inputs: int, cut: int, config: TransformerConfig):
        super().__init__()
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        empty = functools.partial(torch.empty, dtype=config.params_dtype, device=device)
        self.weight = torch.nn.Parameter(empty(experts, outputs, inputs))
        self.bias = torch.nn.Parameter(empty(experts, outputs)) if config.add_bias_linear else None
        # Whether ranks with other experts, or other parts of them, are among those with the same dense weights.
        apart = config.expert_model_parallel_size > 1 or (
            config.expert_tensor_parallel_size != config.tensor_model_parallel_size
        )
        for parameter in self.parameters():
            setattr(parameter, "allreduce", not apart)  # noqa: B010
        set_tensor_model_parallel_attributes(self.weight, True, 1 + cut, 1)
        if self.bias is not None and cut == 0:
            set_tensor_model_parallel_attributes(self.bias, True, 1, 1)

    def forward(self, x_TI: torch.Tensor, groups: Groups) -> torch.Tensor:
        """[T, O], without the bias."""
        return grouped_linear(x_TI, self.weight, groups)


class GroupedExperts(MegatronModule):
    """Gated MLPs, each for the rows that the dispatcher sends to it.

    Args:
        num_local_experts: E.
        config: of the model.
        pg_collection: its groups; those of experts are used.
        name: as Megatron names the module, unused.

    Attributes:
        linear_class: how a projection is computed.
    """

    linear_class = ExpertLinear

    def __init__(
        self,
        num_local_experts: int,
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection,
        name: str | None = None,
    ):
        super().__init__(config=config)
        assert config.gated_linear_unit and config.moe_ffn_hidden_size is not None
        self.ep_group, self.tp_group, self.dp_group = pg_collection.ep, pg_collection.expt_tp, pg_collection.expt_dp
        self.num_local_experts, hidden = num_local_experts, config.hidden_size
        ffn = config.moe_ffn_hidden_size // self.tp_group.size()
        self.linear_fc1 = self.linear_class(num_local_experts, 2 * ffn, hidden, 0, config)
        self.linear_fc2 = self.linear_class(num_local_experts, hidden, ffn, 1, config)

    def forward(
        self, rows_TH: torch.Tensor, tokens_per_expert: torch.Tensor, probs_T: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        """The rows' outputs, times their probabilities, [T, H].

        Args:
            rows_TH: sorted by expert.
            tokens_per_expert: [E], how many rows each has, on any device.
            probs_T: float32.

        Returns:
            The outputs, biases added; and no bias that is still to be added.
        """
        if self.config.moe_apply_probs_on_input:
            rows_TH = (probs_T.unsqueeze(-1) * rows_TH).to(rows_TH.dtype)
            probs_T = torch.ones_like(probs_T)
        counts_E = tokens_per_expert.to(rows_TH.device, torch.int64)
        return self.mlp(rows_TH, Groups(counts_E, len(rows_TH)), probs_T), None

    def mlp(self, rows_TH: torch.Tensor, groups: Groups, probs_T: torch.Tensor) -> torch.Tensor:
        """[T, H]: every expert's MLP over its rows."""
        fc1, fc2, config = self.linear_fc1, self.linear_fc2, self.config
        both_T2F = fc1(rows_TH, groups)
        if fc1.bias is not None:
            both_T2F = both_T2F + grouped_bias(fc1.bias, groups)
        fields = (config.activation_func, config.activation_func_clamp_value, config.glu_linear_offset)
        out_TH = fc2(activate(*fields, both_T2F, probs_T, compiled=both_T2F.is_cuda), groups)
        if fc2.bias is not None:
            out_TH = (out_TH + grouped_bias(fc2.bias, groups) * probs_T.unsqueeze(-1)).to(out_TH.dtype)
        return out_TH

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        """As Megatron's experts have it: [experts, O, I] of the whole layer, under the prefix "experts."."""
        ep_rank, ep_size = self.ep_group.rank(), self.ep_group.size()
        tp_rank, tp_size = self.tp_group.rank(), self.tp_group.size()
        experts = (len(sharded_offsets), ep_rank, ep_size)
        found = {}
        for name, parameter in self.named_parameters():
            key, kind = f"{prefix}experts.{name}", name.split(".", 1)[0]
            whole = kind == "linear_fc2" and parameter.dim() == 2
            replica = (0, tp_rank if whole else 0, self.dp_group.rank())
            axis = len(sharded_offsets) + (1 if kind == "linear_fc1" else 2)
            if kind == "linear_fc1":
                found[prefix + name] = _gate_and_up(
                    key, parameter, (*sharded_offsets, experts), axis, self.tp_group, replica
                )
                continue
            offsets = (*sharded_offsets, experts, *([] if whole else [(axis, tp_rank, tp_size)]))
            found[prefix + name] = ShardedTensor.from_rank_offsets(
                key, parameter, *offsets, replica_id=replica, prepend_axis_num=len(sharded_offsets)
            )
        return found

    def backward_dw(self) -> None:
        """Nothing: gradients of weights are not put off."""


def _gate_and_up(
    key: str,
    parameter: torch.Tensor,
    offsets: tuple,
    axis: int,
    tp_group: torch.distributed.ProcessGroup,
    replica: tuple,
) -> ShardedTensorFactory:
    """A parameter of a rank's gate rows, then its up rows, [E, 2F, ...], as two parts of the whole one."""
    rank, size, prepended = tp_group.rank(), tp_group.size(), axis - 1

    def build(key: str, tensor: torch.Tensor, replica_id: Any, _flattened_range: slice | None) -> list[ShardedTensor]:
        return [
            ShardedTensor.from_rank_offsets(
                key,
                half,
                *offsets,
                (axis, place, 2 * size),
                replica_id=replica_id,
                prepend_axis_num=prepended,
            )
            for half, place in zip(tensor.detach().chunk(2, dim=1), (rank, size + rank), strict=True)
        ]

    def merge(halves: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat(halves, dim=1)

    return ShardedTensorFactory(key, parameter, build, merge, replica)


def activate(
    function: Callable[[torch.Tensor], torch.Tensor],
    limit: float | None,
    offset: float,
    both_T2F: torch.Tensor,
    probs_T: torch.Tensor,
    compiled: bool = True,
) -> torch.Tensor:
    """[T, F]: function(min(gate, limit)) * (clamp(up, -limit, limit) + offset) * probability, as in Megatron's MLP.

    Args:
        function: of the gate.
        limit: None for none.
        offset: added to the second factor.
        both_T2F: gates, then ups.
        probs_T: float32.
        compiled: as one kernel forward and one backward.
    """
    plain = _activation(function, limit, offset)
    if not compiled or not len(both_T2F):
        return plain(both_T2F, probs_T)
    for tensor in (both_T2F, probs_T):
        torch._dynamo.maybe_mark_dynamic(tensor, 0)
    return _compiled(plain)(both_T2F, probs_T)


@functools.cache
def _compiled(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return torch.compile(function, fullgraph=True)


@functools.cache
def _activation(
    function: Callable[[torch.Tensor], torch.Tensor], limit: float | None, offset: float
) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    def activation(both_T2F: torch.Tensor, probs_T: torch.Tensor) -> torch.Tensor:
        gate_TF, up_TF = both_T2F.chunk(2, dim=-1)
        if limit is not None:
            gate_TF, up_TF = gate_TF.clamp(max=limit), up_TF.clamp(min=-limit, max=limit)
        inner_TF = function(gate_TF) * (up_TF + offset)
        return (inner_TF * probs_T.unsqueeze(-1)).to(inner_TF.dtype)

    return activation

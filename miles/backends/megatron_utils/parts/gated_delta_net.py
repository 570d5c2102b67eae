"""Gated delta nets (Yang et al. 2024, "Gated Delta Networks") over packed sequences: Megatron's module.

Shapes: T tokens of a micro-batch, S sequences, L the longest of them, N heads, D head size, C channels, W the width of
a convolution.
"""

import importlib.util
import itertools

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules, common, gdn
from megatron.core.ssm.gated_delta_net.common import torch_chunk_gated_delta_rule
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.spec_utils import ModuleSpec
from packaging.version import Version
from torch.nn.utils.rnn import pad_sequence

from miles.backends.megatron_utils.parts.norms import RMSNorm
from miles.backends.megatron_utils.parts.packed import PackedSequences

# Whether flash-linear-attention is installed.
KERNELS_INSTALLED = common.HAVE_FLA


def kernel_problems() -> list[str]:
    """What a gated delta net lacks on this machine: on a GPU, flash-linear-attention with kernels that work there."""
    if not torch.cuda.is_available():
        return []
    if not KERNELS_INSTALLED:
        return ["its gated delta nets need flash-linear-attention on a GPU: pip install flash-linear-attention"]
    import triton

    # Triton's code for this backward pass is wrong on Hopper there, and flash-linear-attention refuses it, in a step.
    wrong = Version("3.4.0") <= Version(triton.__version__) < Version("3.7.1")
    if wrong and torch.cuda.get_device_capability()[0] == 9 and importlib.util.find_spec("tilelang") is None:
        return [
            f"flash-linear-attention cannot train its gated delta nets on a Hopper GPU with triton "
            f"{triton.__version__}: pip install tilelang, whose kernels it takes then"
        ]
    return []


def gated_delta_net_spec() -> ModuleSpec:
    """A gated delta net in the place of a layer's attention."""
    submodules = GatedDeltaNetSubmodules(in_proj=ColumnParallelLinear, out_norm=RMSNorm, out_proj=RowParallelLinear)
    return ModuleSpec(module=PackedGatedDeltaNet, submodules=submodules)


class PackedGatedDeltaNet(GatedDeltaNet):
    """Megatron's gated delta net, on a CPU too; under context parallelism it exchanges tokens for heads.

    Under tensor parallelism its norm's gradient is complete with sequence parallelism only.
    """

    def __init__(self, *args, **kwargs):
        if not torch.cuda.is_available():
            _install_torch_functions()
        super().__init__(*args, **kwargs)

    def forward(self, hidden_states: torch.Tensor, attention_mask, packed_seq_params: PackedSequences, **_):
        """[T, 1, hidden] -> [T, 1, hidden] and no bias; T cut under sequence and context parallelism."""
        cu_seqlens = packed_seq_params.cu_seqlens_q
        boundaries = PackedSeqParams(qkv_format="thd", cu_seqlens_q=cu_seqlens, cu_seqlens_kv=cu_seqlens)
        # Megatron's overlapped gather of parameters waits in the hooks of a call; the convolution is read without one.
        for hook in self.conv1d._forward_pre_hooks.values():
            hook(self.conv1d, ())
        return super().forward(hidden_states, attention_mask, packed_seq_params=boundaries)

    def _resolve_cu_seqlens(self, cu_seqlens_padded, cu_seqlens_actual, *_args, **_kwargs) -> torch.Tensor:
        # Megatron's checks wait for the device in every layer; `packed_sequences` has made them.
        return cu_seqlens_actual

    def _compute_g_and_beta(self, A_log_local_cp, dt_bias_local_cp, alpha, beta):
        # In float32 throughout, as transformers and engines do it; Megatron takes the exponential in the model's type.
        g = -A_log_local_cp.float().exp() * F.softplus(alpha.float() + dt_bias_local_cp.float())
        return g, beta.sigmoid()


def _install_torch_functions() -> None:
    """Give Megatron's module what it takes from flash-linear-attention, which has no kernels for a CPU."""
    common.HAVE_FLA = True
    common.l2norm = _l2norm
    gdn.causal_conv1d = _causal_conv1d
    gdn.chunk_gated_delta_rule = _chunk_gated_delta_rule


def _l2norm(x: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    return x * torch.rsqrt(x.float().square().sum(-1, keepdim=True) + eps).to(x.dtype)


def _causal_conv1d(x, weight, bias, activation, initial_state, output_final_state, cu_seqlens):
    """x [1, T, C], weight [C, W] -> [1, T, C]: a convolution of each channel within each sequence, then silu."""
    assert activation == "silu" and initial_state is None and not output_final_state
    x_SCL = _padded(x, cu_seqlens).transpose(1, 2)
    out_SCL = F.conv1d(F.pad(x_SCL, (weight.shape[1] - 1, 0)), weight[:, None], bias, groups=len(weight))
    return _packed(F.silu(out_SCL).transpose(1, 2), cu_seqlens), None


def _chunk_gated_delta_rule(q, k, v, g, beta, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens):
    """q, k, v [1, T, N, D], g and beta [1, T, N] -> [1, T, N, D of v]."""
    assert initial_state is None and not output_final_state and not use_qk_l2norm_in_kernel
    q, k, v, g, beta = (_padded(x, cu_seqlens) for x in (q, k, v, g, beta))
    return _packed(torch_chunk_gated_delta_rule(q, k, v, g, beta)[0], cu_seqlens), None


def _padded(x_1T: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    """[1, T, ...] -> [S, L, ...]: one row a sequence, zeros behind it, where nothing causal looks."""
    return pad_sequence(
        [x_1T[0, start:end] for start, end in itertools.pairwise(cu_seqlens.tolist())], batch_first=True
    )


def _packed(x_SL: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    """The inverse of `_padded`."""
    return torch.cat([row[:length] for row, length in zip(x_SL, cu_seqlens.diff().tolist(), strict=True)])[None]

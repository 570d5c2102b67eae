"""A gated delta net before Megatron's module; hf/test_qwen3_next.py holds its numbers to those of transformers."""

import torch
from megatron.core.ssm.gated_delta_net import GatedDeltaNet

from miles.backends.megatron_utils.parts.gated_delta_net import PackedGatedDeltaNet
from miles.backends.megatron_utils.parts.packed import packed_sequences


def test_the_convolution_waits_for_its_gathered_weight(monkeypatch):
    """Else --overlap-param-gather trains with the weight of the step before, if no neighbour is in its bucket."""
    events = []
    monkeypatch.setattr(GatedDeltaNet, "forward", lambda *_, **__: events.append("forward"))
    net = PackedGatedDeltaNet.__new__(PackedGatedDeltaNet)
    torch.nn.Module.__init__(net)
    net.conv1d = torch.nn.Conv1d(4, 4, 2, groups=4)
    net.conv1d.register_forward_pre_hook(lambda module, _: events.append(module))
    boundaries = packed_sequences(torch.tensor([0, 3], dtype=torch.int32), torch.arange(3), 3, {})
    net(torch.zeros(3, 1, 4), None, packed_seq_params=boundaries)
    assert events == [net.conv1d, "forward"]

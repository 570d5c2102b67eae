"""The float32 copies that SGLang's GLM routers make of their weights follow an update."""

from importlib.metadata import files
from types import SimpleNamespace

import torch
import torch.nn.functional as F

from miles.backends.sglang_utils.float32_copies import COPY, UPDATES, refresh


class Gate(torch.nn.Module):
    """Scores as sglang.srt.models.glm4_moe.Glm4MoeGate does."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2, 4, dtype=torch.bfloat16), requires_grad=False)
        self.register_buffer(COPY, None, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._weight_fp32 is None:
            self._weight_fp32 = self.weight.data.to(torch.float32)
        return F.linear(x.float(), self._weight_fp32)


def test_copies_follow_an_update():
    model = torch.nn.ModuleDict({"used": Gate(), "unused": Gate()})
    x = torch.ones(4)
    assert model["used"](x).tolist() == [4.0, 4.0]
    memory = model["used"]._weight_fp32.data_ptr()
    for gate in model.values():
        gate.weight.data.fill_(2.0)
    assert model["used"](x).tolist() == [4.0, 4.0]  # what is to be cured
    refresh((True, "updated"), SimpleNamespace(model=model), named_tensors=[])
    assert model["used"](x).tolist() == [8.0, 8.0]
    assert model["used"]._weight_fp32.data_ptr() == memory
    assert model["unused"](x).tolist() == [8.0, 8.0]


def source(name: str) -> str:
    (path,) = (path for path in files("sglang") if str(path) == f"sglang/srt/{name}.py")
    return path.read_text()


def test_sglang_still_has_what_is_hooked():
    runner = source("model_executor/model_runner")
    assert all(f"    def {update}(" in runner for update in UPDATES)
    for model in ("glm4_moe", "glm4_moe_lite"):
        text = source(f"models/{model}")
        assert f'self.register_buffer("{COPY}", None, persistent=False)' in text
        assert f"self.{COPY} = self.weight.data.to(torch.float32)" in text

"""A model that stands in for Megatron's."""

import torch

from miles.backends.megatron_utils.hf import family_for


class StageModel(torch.nn.Module):
    """Parameters with the names and shapes of one pipeline stage's GPTModel, all zero; stands in where none is run."""

    def __init__(self, config, layers, first=True, last=True, tp_size=1, dtype=torch.float32):
        super().__init__()
        for entry in family_for(config).entries(config, layers, first, last):
            shape = entry.kind.split([torch.empty(s) for s in entry.shapes], 0, tp_size).shape
            *path, name = entry.megatron_name.split(".")
            module = self
            for part in path:
                if part not in dict(module.named_children()):
                    module.add_module(part, torch.nn.Module())
                module = module.get_submodule(part)
            module.register_parameter(name, torch.nn.Parameter(torch.zeros(shape, dtype=dtype)))

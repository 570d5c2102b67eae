"""A model that stands in for Megatron's, awake and asleep."""

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


def fall_asleep(model):
    """Free the memory behind every parameter, as a sleeping trainer's is; returns a `read` that serves copies."""
    copies = {parameter: parameter.detach().clone() for parameter in model.parameters()}
    for parameter in copies:
        parameter.untyped_storage().resize_(0)
    return copies.__getitem__


def no_group():
    raise AssertionError("a group was asked for where its size is 1")

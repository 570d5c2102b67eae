"""Models that stand in for Megatron's, awake and asleep."""

from dataclasses import dataclass, replace

import torch
from safetensors.torch import save_file
from transformers import Qwen2Config

from miles.backends.megatron_utils.families import family_for
from miles.backends.megatron_utils.families.base import Family
from miles.backends.megatron_utils.weight_source import MegatronWeights
from miles.hf.entries import EMBEDDING, HEAD, Entry
from miles.hf.layouts import Column, Gated, Qkv, Replicated, Row, Vocab
from miles.weight_sync.bucket import views
from miles.weight_sync.format import CheckpointFormat
from miles.weight_sync.gather import Gatherer
from miles.weight_sync.source import live
from miles.weight_sync.updater import SyncSettings


class StageModel(torch.nn.Module):
    """Parameters with the names and shapes of one model chunk's GPTModel, all zero; stands in where none is run."""

    def __init__(self, config, layers, first=True, last=True, tp_size=1, dtype=torch.float32):
        super().__init__()
        for entry in family_for(config).entries(config, layers, first, last):
            shape = entry.kind.split([torch.empty(s) for s in entry.shapes], 0, tp_size).shape
            add_parameter(self, entry.megatron_name, torch.zeros(shape, dtype=dtype))


def add_parameter(module, path, value):
    *path, name = path.split(".")
    for part in path:
        if part not in dict(module.named_children()):
            module.add_module(part, torch.nn.Module())
        module = module.get_submodule(part)
    module.register_parameter(name, torch.nn.Parameter(value))


def fall_asleep(*models):
    """Free the memory behind every parameter, as a sleeping trainer's is; returns a `read` that serves copies."""
    copies = {parameter: parameter.detach().clone() for model in models for parameter in model.parameters()}
    for parameter in copies:
        parameter.untyped_storage().resize_(0)
    # Not the same memory twice: a copy on a GPU is new each time.
    return lambda parameter, expert=None: live(copies[parameter], expert).clone()


@dataclass(frozen=True)
class StackedColumn:
    """All experts' output rows (dimension 1), cut evenly."""

    sharded = True

    def split(self, tensors, rank, size):
        (weight_EOI,) = tensors
        return weight_EOI.chunk(size, 1)[rank]

    def merge(self, shards):
        return [torch.cat(list(shards), 1)]


class ExpertFamily(Family):
    """Every kind of entry there is, in tensors of a few hundred bytes; an odd vocabulary, which is padded at TP 2."""

    experts, hidden, ffn, vocab = 4, 16, 24, 37

    def entries(self, config, layers, first_stage, last_stage, ep_size=1):
        h, f, found = self.hidden, self.ffn, []
        if first_stage:
            found.append(Entry(Vocab(self.vocab), "embedding.weight", (EMBEDDING,), ((self.vocab, h),)))
        for local, layer in enumerate(layers):
            hf, name = f"model.layers.{layer}.", f"decoder.layers.{local}."
            qkv = tuple(f"{hf}{part}.weight" for part in "qkv")
            key = f"{hf}latent"
            found += [
                Entry(Replicated(), name + "norm", (hf + "norm.weight",), ((h,),)),
                Entry(Qkv(2, 2, 8), name + "qkv", qkv, ((32, h), (16, h), (16, h))),
                Entry(Column(), name + "q_a", (hf + "q_a.weight",), ((f, h),), atomic=key),
                Entry(Replicated(), name + "q_a_norm", (hf + "q_a_norm.weight",), ((f,),)),
                Entry(Replicated(), name + "kv_a", (hf + "kv_a.weight",), ((f, h),), atomic=key),
                Entry(Replicated(), name + "router_bias", (hf + "router_bias",), ((self.experts,),)),
            ]
            for expert in range(self.experts):
                owner, own = divmod(expert, self.experts // ep_size)
                there, here, held = f"{hf}experts.{expert}.", name + "experts.", dict(ep_rank=owner, expert=own)
                gated = (there + "gate.weight", there + "up.weight")
                found.append(Entry(Gated(), here + "fc1", gated, ((f, h), (f, h)), **held))
                found.append(Entry(Row(), here + "fc2", (there + "down.weight",), ((h, f),), **held))
            stacked = ((self.experts, f, 2),)
            found.append(Entry(StackedColumn(), name + "experts.sink", (hf + "sinks",), stacked, stacked=True))
        if last_stage:
            found.append(Entry(Vocab(self.vocab), "output_layer.weight", (HEAD,), ((self.vocab, h),)))
        return found


def expert_checkpoint(folder, layers=4):
    """A checkpoint of ExpertFamily in bf16, with the router's biases in float32; returns its configuration."""
    generator = torch.Generator().manual_seed(0)
    weights = {}
    for entry in ExpertFamily().entries(None, range(layers), True, True):
        for name, shape in zip(entry.hf_names, entry.shapes, strict=True):
            dtype = torch.float32 if "router_bias" in name else torch.bfloat16
            weights[name] = torch.randn(shape, generator=generator).to(dtype)
    folder.mkdir(parents=True)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = Qwen2Config(num_hidden_layers=layers, tie_word_embeddings=False)
    config.save_pretrained(folder)
    return config


def expert_chunk(index, parallel, chunk):
    """What a rank of the grid `parallel` holds of chunk `chunk` of its stage, with the checkpoint's values."""
    layers = parallel.chunk_layers
    place, last = (parallel.pp_rank, chunk), (len(layers) - 1, len(layers[0]) - 1)
    module = torch.nn.Module()
    experts: dict[str, list[torch.Tensor]] = {}
    for entry in ExpertFamily().entries(
        None, layers[parallel.pp_rank][chunk], place == (0, 0), place == last, parallel.ep_size
    ):
        tensors = [index.read(name).clone() for name in entry.hf_names]
        if entry.stacked:
            cut = entry.kind.split(tensors, parallel.etp_rank, parallel.etp_size)
            add_parameter(module, entry.megatron_name, cut.chunk(parallel.ep_size)[parallel.ep_rank].clone())
        elif entry.ep_rank is None:
            add_parameter(module, entry.megatron_name, entry.kind.split(tensors, parallel.tp_rank, parallel.tp_size))
        elif entry.ep_rank == parallel.ep_rank:
            value = entry.kind.split(tensors, parallel.etp_rank, parallel.etp_size)
            experts.setdefault(entry.megatron_name, []).append(value)
    for name, values in experts.items():
        add_parameter(module, name, torch.stack(values))
    return module


def grid(new_group, rank, world_size, tp=1, pp=1, ep=1, etp=1, chunks=1, layers=4):
    """The ParallelInfo of a rank, with real groups: `new_group(ranks)` is called for every group on every rank."""
    from miles.hf.parallel import ParallelInfo, no_group

    per_stage = world_size // pp
    stage, place = divmod(rank, per_stage)

    def own(groups):
        made = {tuple(ranks): new_group(ranks) for ranks in groups}
        return next(group for ranks, group in made.items() if rank in ranks)

    stages = [range(s * per_stage, (s + 1) * per_stage) for s in range(pp)]
    tp_group = own([s[i : i + tp] for s in stages for i in range(0, per_stage, tp)])
    pp_group = own([range(i, world_size, per_stage) for i in range(per_stage)])
    etp_group = own([s[i : i + etp] for s in stages for i in range(0, per_stage, etp)])
    ep_group = own(
        [s[i + j : i + j + ep * etp : etp] for s in stages for i in range(0, per_stage, ep * etp) for j in range(etp)]
    )
    # Uneven: the first chunk of the first stage has one layer less than the last of the last.
    cuts = [layers * n // (pp * chunks) for n in range(pp * chunks + 1)]
    ranges = [range(a, b) for a, b in zip(cuts, cuts[1:], strict=False)]
    return ParallelInfo(
        tp_rank=place % tp,
        tp_size=tp,
        tp_group=(lambda: tp_group) if tp > 1 else no_group,
        pp_rank=stage,
        pp_size=pp,
        pp_group=(lambda: pp_group) if pp > 1 else no_group,
        chunk_layers=[[ranges[chunk * pp + s] for chunk in range(chunks)] for s in range(pp)],
        ep_rank=place // etp % ep,
        ep_size=ep,
        ep_group=(lambda: ep_group) if ep > 1 else no_group,
        etp_rank=place % etp,
        etp_size=etp,
        etp_group=(lambda: etp_group) if etp > 1 else no_group,
    )


def hf_tensors(chunks, family, hf_config, parallel, index, read):
    """Check everything, then return an iterator over every (name, full tensor) of the model, on all ranks in step."""
    source = MegatronWeights(chunks, family, hf_config, parallel, index, read, copies=True)
    return gathered(Gatherer(source, CheckpointFormat(), 256 * 2**20))


def gathered(gatherer):
    """Every (name, tensor) that engines would be sent, on all ranks in step."""
    for bucket in gatherer.buckets:
        flat = torch.empty(bucket.nbytes, dtype=torch.uint8)
        if (failure := gatherer.fill(bucket, flat, everywhere=True)) is not None:
            raise failure
        yield from views(bucket, flat).items()
        del flat


def sync_settings(folder, **changes):
    """What an updater's engines and the user say; `folder`: the checkpoint."""
    settings = SyncSettings(
        checkpoint_folder=folder,
        buffer_size=100_000,
        flush_cache=True,
        pause_mode="retract",
        transfer_mode="broadcast",
        disk_folder=None,
        check_equal=False,
    )
    return replace(settings, **changes)


def alone(layers):
    """The ParallelInfo of a model that one process holds."""
    return grid(lambda ranks: None, 0, 1, layers=layers)

"""The second trainer: plain PyTorch over a model of transformers, in one process, in float32.

It knows nothing of Megatron: the model is transformers' own, each sequence passes through it alone, and
log-probabilities are a log_softmax. What it shares with Megatron's trainer is `miles.backends.trainer`.
"""

import copy
import json

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as distributed_checkpoint
from transformers import AutoModelForCausalLM

from miles.backends.trainer import side_input
from miles.backends.trainer.actor import TrainRayActor
from miles.backends.trainer.critic import CriticRayActor
from miles.backends.trainer.protocol import TAGS, ProcessGrid, Scoring
from miles.backends.trainer.rank import RankActor
from miles.backends.trainer.world import join_world
from miles.config.continued import settings_of
from miles.hf.checkpoint import CheckpointIndex
from miles.hf.config import load_hf_config
from miles.residency.memory import pack
from miles.residency.plan import Party, Region
from miles.utils.checkpoint_folder import MODEL
from miles.utils.errors import UserError
from miles.weight_sync.source import FullTensor, SourcePart

MOMENTS = ("exp_avg", "exp_avg_sq")
FACTS = "facts.json"


class KeptGroups:
    """Process groups that stay through a sleep: a backend's that has no others."""

    def __init__(self, agreement):
        self.agreement = agreement
        self.alive = True

    def destroy(self):
        self.alive = False

    def rebuild(self):
        self.alive = True

    def verify(self):
        assert self.alive


class PlainWeights:
    """See `WeightSource`: transformers names its parameters as its checkpoints do."""

    def __init__(self, parameters, index, read):
        if parameters.keys() != index.files.keys():
            raise UserError(f"model and checkpoint differ in {sorted(parameters.keys() ^ index.files.keys())}")
        self.parameters, self.index, self.read = parameters, index, read
        self.device, self.stage, self.stages, self.untrained = torch.device("cpu"), 0, 1, ()

    def parts(self, limit):
        return [
            SourcePart(name, (FullTensor(name, tuple(parameter.shape), parameter.dtype),))
            for name, parameter in self.parameters.items()
        ]

    def fill(self, parts, limit, write):
        for part in parts:
            try:
                value = self.read(self.parameters[part.key])
            except Exception as error:
                return error
            write(part.key, value)
        return None

    def share_owned(self, piece, owner):
        """One rank has everything."""

    def share_stage(self, flat, stage):
        """One rank has everything."""


class PlainModel:
    """See `TrainedModel`."""

    def __init__(self, config, hf_config, party):
        assert not config.bf16 and config.lr_decay_style == "constant" and not config.lr_warmup_iters
        self.config, self.hf_config, self.party = config, hf_config, party
        # Sequences come one by one, so that a packed micro-batch needs no attention of its own.
        self.model = AutoModelForCausalLM.from_config(copy.deepcopy(hf_config), attn_implementation="eager")
        self.model.float().train()
        group = lambda: dist.group.WORLD  # noqa: E731
        self.grid = ProcessGrid(0, 0, 1, True, True, *[group] * 4)
        self.pad_multiple = config.data_pad_size_multiplier
        self.scoring = Scoring.of(config, hf_config.vocab_size)
        self._num_steps = 0

    # Weights

    def weights(self):
        # A tied head is the embedding: each once.
        return list(dict.fromkeys(self.model.state_dict(keep_vars=True).values()))

    @torch.no_grad()
    def load_hf(self, folder):
        loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
        own = self.model.state_dict()
        assert own.keys() == loaded.keys()
        for name, weight in own.items():
            weight.copy_(loaded[name])
        if self.party is Party.CRITIC:
            self.model.lm_head = torch.nn.Linear(self.hf_config.hidden_size, 1)
            self.model.lm_head.weight.zero_()
            self.model.lm_head.bias.zero_()

    def check_same_computation(self, flag, folder):
        theirs, ours = (config.to_dict() for config in (load_hf_config(folder), self.hf_config))
        if any(theirs.get(name) != value for name, value in ours.items() if not name.startswith("_")):
            raise UserError(f"the model in {folder} ({flag}) computes otherwise than the one in --hf-checkpoint")

    def weight_source(self, read, copies):
        index = CheckpointIndex(self.config.hf_checkpoint)
        return PlainWeights(dict(self.model.named_parameters()), index, read)

    # Training

    def build_optimizer(self, config, total_steps):
        decayed = [parameter for parameter in self.model.parameters() if parameter.dim() > 1]
        others = [parameter for parameter in self.model.parameters() if parameter.dim() == 1]
        self.optimizer = torch.optim.AdamW(
            [{"params": decayed}, {"params": others, "weight_decay": 0.0}],
            lr=config.lr,
            betas=(config.adam_beta1, config.adam_beta2),
            eps=config.adam_eps,
            weight_decay=config.weight_decay,
        )
        self.settings = settings_of(config)
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
            self.optimizer.state[parameter] = {"step": torch.tensor(0.0)}
            self.optimizer.state[parameter] |= {moment: torch.zeros_like(parameter) for moment in MOMENTS}

    def begin(self, agreement):
        self.groups = KeptGroups(agreement)

    def run(self, micro_batches, function, forward_only):
        collected = []
        for packed in micro_batches:
            with side_input.running(packed):
                scores = self._scores(packed)
            loss, found = function(*scores, packed)
            if not forward_only:
                loss.backward()
            collected.append(found)
        return collected

    def _scores(self, packed):
        bounds = packed.cu_seqlens.tolist()
        parts = [packed.tokens_T[start:end] for start, end in zip(bounds, bounds[1:], strict=False)]
        hidden_TH = torch.cat([self.model.model(part[None]).last_hidden_state[0] for part in parts])
        logits_NV = self.model.lm_head(hidden_TH[packed.logit_index_N])
        if self.party is Party.CRITIC:
            return (logits_NV[:, 0],)
        log_p_NV = torch.log_softmax(logits_NV / self.scoring.temperature, dim=-1)
        entropy_N = -(log_p_NV.exp() * log_p_NV).sum(-1)
        if not self.scoring.entropy_grad:
            entropy_N = entropy_N.detach()
        return log_p_NV.gather(1, packed.target_N[:, None])[:, 0], entropy_N

    def begin_step(self, micro_batches):
        self.optimizer.zero_grad(set_to_none=False)

    def end_passes(self):
        return {}

    def gradient_norm(self):
        return float(torch.nn.utils.get_total_norm([parameter.grad for parameter in self.model.parameters()]))

    def apply_gradients(self, norm):
        if self.config.clip_grad > 0:
            parameters = list(self.model.parameters())
            torch.nn.utils.clip_grads_with_norm_(parameters, self.config.clip_grad, torch.tensor(norm))
        self.optimizer.step()
        self._num_steps += 1

    def end_steps(self):
        pass

    @property
    def learning_rate(self):
        return self.optimizer.param_groups[0]["lr"]

    @property
    def num_steps(self):
        return self._num_steps

    @torch.no_grad()
    def reset_optimizer(self):
        for state in self.optimizer.state.values():
            for value in state.values():
                value.zero_()

    # Checkpoints: torch's format for the tensors, and a file of what else there is.

    def _weights_by_name(self):
        return {name: parameter.detach() for name, parameter in self.model.named_parameters()}

    def _state_by_name(self):
        named = self.model.named_parameters()
        states = {name: self.optimizer.state[parameter] for name, parameter in named}
        return {f"{key} of {name}": value for name, state in states.items() for key, value in state.items()}

    def save_state(self, folder, with_optimizer):
        tensors, facts = self._weights_by_name(), {"critic": self.party is Party.CRITIC}
        if with_optimizer:
            tensors |= self._state_by_name()
            facts |= {"steps": self._num_steps, "settings": self.settings}
        distributed_checkpoint.save(tensors, checkpoint_id=folder / MODEL)
        (folder / MODEL / FACTS).write_text(json.dumps(facts))

    def load_state(self, folder, with_optimizer):
        self.load_weights(folder / MODEL)
        if with_optimizer:
            if self.saved_settings(folder) is None:
                raise UserError(f"{folder} holds no optimizer state: pass --no-load-optim")
            distributed_checkpoint.load(self._state_by_name(), checkpoint_id=folder / MODEL)
            self._num_steps = self._facts(folder)["steps"]

    def save_weights(self, folder):
        distributed_checkpoint.save(self._weights_by_name(), checkpoint_id=folder)

    def load_weights(self, folder):
        distributed_checkpoint.load(self._weights_by_name(), checkpoint_id=folder)

    def saved_settings(self, folder):
        return self._facts(folder).get("settings")

    def is_of_critic(self, folder):
        return self._facts(folder)["critic"]

    @staticmethod
    def _facts(folder):
        return json.loads((folder / MODEL / FACTS).read_text())

    # Memory

    def build_regions(self, memory):
        parameters = list(self.model.parameters())
        states = [self.optimizer.state[parameter] for parameter in parameters]
        contents = {
            Region.WEIGHTS: [parameters],
            Region.GRADS: [[parameter.grad for parameter in parameters]],
            Region.OPTIMIZER: [[state[moment] for state in states] for moment in MOMENTS],
        }
        return {
            region: [pack(tensors, memory, TAGS[region]) for tensors in several] for region, several in contents.items()
        }

    def lasting_tensors(self):
        return self._weights_by_name() | dict(self.model.named_buffers()) | self._state_by_name()

    def master_weights(self, contents):
        raise UserError("--rematerialize-param-from-master-weight: float32 weights are their own masters")

    def drop_workspaces(self):
        pass


class PlainRank(RankActor):
    """What actor and critic share."""

    def _build_model(self, master):
        join_world(self.config, self.rank, self.world_size, master)
        torch.manual_seed(self.config.seed)
        return PlainModel(self.config, load_hf_config(self.config.hf_checkpoint), self.party)


class PlainTrainRayActor(PlainRank, TrainRayActor):
    """The actor."""


class PlainCriticRayActor(PlainRank, CriticRayActor):
    """The critic."""

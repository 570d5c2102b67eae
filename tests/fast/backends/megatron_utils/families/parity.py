"""A tiny random model of any family against transformers, in fp32: what test_parity.py starts two ranks with.

Compared are the log-probability of every token of eight sequences, packed and each alone with padding behind it; the
gradient of their weighted sum in every weight, under the checkpoint's names; and every weight on its way into the model
and back.
"""

import contextlib
import importlib
import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

from tests.fast.backends.megatron_utils.families.record import FamilyTests
from tests.fast.ranks import leave_world

DATA = "tests.fast.backends.megatron_utils.families.data"
FULL = ["--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"]
# {name: (ranks, flags of train.py)}
LAYOUTS = {
    "one": (1, []),
    "tp2_sp": (2, ["--tensor-model-parallel-size", "2", "--sequence-parallel"]),
    # Whole experts on each rank.
    "tp2_sp_etp1": (
        2,
        ["--tensor-model-parallel-size", "2", "--sequence-parallel", "--expert-tensor-parallel-size", "1"],
    ),
    # Of three layers one on the first stage.
    "pp2": (2, ["--pipeline-model-parallel-size", "2", "--decoder-first-pipeline-num-layers", "1"]),
    "cp2": (2, ["--context-parallel-size", "2"]),
    "ep2": (2, ["--expert-model-parallel-size", "2"]),
    "dp2": (2, []),
    "tp2_sp_ep2": (
        2,
        ["--tensor-model-parallel-size", "2", "--sequence-parallel", "--expert-model-parallel-size", "2"],
    ),
    # Of four layers two on each stage, which take turns.
    "pp2_interleaved": (
        2,
        ["--pipeline-model-parallel-size", "2", "--num-layers-per-virtual-pipeline-stage", "1"],
    ),
    "recompute_core": (1, ["--recompute-granularity", "selective", "--recompute-modules", "core_attn"]),
    "recompute_full": (1, FULL),
    "tp2_sp_recompute_full": (2, ["--tensor-model-parallel-size", "2", "--sequence-parallel", *FULL]),
}
LENGTHS = [100, 7, 61, 24, 33, 90, 5, 48]
# A sequence that stands alone is padded to a multiple of this.
PADDED_LENGTH = 128


def prepare(folder: Path, family: FamilyTests) -> Path:
    """For each case of a family: a random checkpoint as the hub has it, and the answers.

    Norms are drawn around one where transformers starts them at one, else around zero.
    """
    # At these sizes two threads mostly wait for each other: ten times the time.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for name, hf_config in family.cases.items():
        _prepare(folder / name, hf_config, family)
    torch.set_num_threads(threads)
    return folder


def _prepare(folder: Path, hf_config, family: FamilyTests) -> None:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(hf_config, dtype=torch.float32, attn_implementation="eager")
    saved = model.state_dict().keys()
    with torch.no_grad():
        for name, weight in [*model.named_parameters(), *model.named_buffers()]:
            # Buffers that no checkpoint has follow from the configuration.
            if name not in saved or not weight.is_floating_point():
                continue
            center = float(weight.mean()) if "norm" in name and weight.dim() == 1 else 0.0
            weight.normal_(center, family.std if weight.dim() > 1 else 0.1)
    if family.fill is not None:
        family.fill(model)
    family.save(model, folder / "checkpoint")
    log_probs = []
    for tokens in sequences(hf_config.vocab_size):
        log_p_TV = torch.log_softmax(model(tokens[None]).logits[0, :-1], -1)
        log_probs.append(log_p_TV.gather(1, tokens[1:, None])[:, 0])
    log_probs_N = torch.cat(log_probs)
    (log_probs_N * weights_N()).sum().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.0 if parameter.grad is None else parameter.grad)
    # Written as weights, the gradients get the checkpoint's names and layouts.
    family.save(model, folder / "gradients")
    torch.save(log_probs_N.detach(), folder / "log_probs.pt")


def sequences(vocab_size: int) -> list[torch.Tensor]:
    """The tokens of all samples."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, vocab_size, (length,), generator=generator) for length in LENGTHS]


def weights_N() -> torch.Tensor:
    """What each log-probability counts in the loss."""
    count = sum(LENGTHS) - len(LENGTHS)
    return torch.randn(count, generator=torch.Generator().manual_seed(2)) / count


def summary(found: dict) -> str:
    """The largest differences of one case."""
    worst = max(found["gradients"], key=found["gradients"].get)
    return (
        f"log-probabilities {found['packed']:.1e} packed, {found['padded']:.1e} padded; "
        f"gradients {found['gradients'][worst]:.1e} ({worst})"
    )


# --- on a rank ---


def run_config(checkpoint: Path, layout: str):
    """The configuration of a run on `checkpoint`."""
    from miles.utils.arguments import parse_args

    ranks, flags = LAYOUTS[layout]
    prompts = checkpoint.parent / "prompts.jsonl"
    prompts.write_text('{"input": "a", "label": "b"}\n')
    return parse_args(
        [
            *("--device", "cpu", "--hf-checkpoint", str(checkpoint), "--prompt-data", str(prompts)),
            *("--label-key", "label", "--loss-type", "sft_loss", "--num-rollout", "1", "--rollout-batch-size", "4"),
            # The gradients of a distributed optimizer are each rank's own part only.
            *("--n-samples-per-prompt", "1", "--no-use-distributed-optimizer"),
            *("--actor-num-gpus-per-node", str(ranks), *flags),
        ]
    )


def micro_batches(rows: list[list[int]], vocab_size: int, pad_multiple: int) -> list:
    """The samples of each micro-batch, packed; all tokens but a sample's first are its response."""
    import numpy as np
    from megatron.core import parallel_state

    from miles.training.batch import TrainBatch, offsets_of
    from miles.training.packing import pack

    count, lengths = len(LENGTHS), np.array(LENGTHS)
    batch = TrainBatch(
        columns={
            "tokens": torch.cat(sequences(vocab_size)).int().numpy(),
            "loss_masks": np.ones(sum(LENGTHS) - count, np.int8),
            "truncated": np.zeros(count, np.int64),
            "sample_indices": np.arange(count),
            "group_indices": np.arange(count),
            "rollout_ids": np.arange(count),
            "token_weights": np.ones(count, np.float32),
            "metric_weights": np.ones(count, np.float32),
        },
        token_offsets=offsets_of(lengths),
        response_offsets=offsets_of(lengths - 1),
    )
    cp_rank, cp_size = parallel_state.get_context_parallel_rank(), parallel_state.get_context_parallel_world_size()
    return [pack(batch, part, pad_multiple, "cpu", cp_rank, cp_size) for part in rows]


class Built:
    """One case's model in a layout, loaded from its checkpoint: what is measured of it."""

    def __init__(self, folder: Path, layout: str, changes: dict | None = None):
        from miles.backends.megatron_utils.families import family_for
        from miles.backends.megatron_utils.hf_weights import load_into
        from miles.backends.megatron_utils.model import build_model, build_train_state, parallel_info
        from miles.hf.checkpoint import CheckpointIndex
        from miles.hf.config import load_hf_config

        self.folder, self.index = folder, CheckpointIndex(folder / "checkpoint")
        self.config, self.hf_config = run_config(folder / "checkpoint", layout), load_hf_config(folder / "checkpoint")
        for name, value in (changes or {}).items():
            setattr(self.hf_config, name, value)
        self.family = family_for(self.hf_config)
        self.chunks = build_model(self.config, self.hf_config)
        self.parallel = parallel_info(self.chunks[0].config)
        load_into(self.chunks, self.family, self.hf_config, folder / "checkpoint", self.parallel)
        self.state = build_train_state(self.config, self.chunks, total_steps=1)

    def gathered(self):
        """Every (name, whole tensor) of the model as the checkpoint has it, on all ranks in step."""
        from miles.weight_sync.source import live
        from tests.fast.weight_sync.conftest import hf_tensors

        return hf_tensors(self.chunks, self.family, self.hf_config, self.parallel, self.index, live)

    def weights_changed(self) -> list[str]:
        """Names of weights that are other ones after their way into the model and back, or came on one way only."""
        from miles.backends.megatron_utils.hf_weights import untrained_names

        index, back = self.index, {name: tensor.clone() for name, tensor in self.gathered()}
        changed = sorted(name for name in index.files if name in back and not torch.equal(back[name], index.read(name)))
        # Names that a checkpoint lists and that are no weights of ours.
        ignored = {name for name in index.files if name.endswith(self.family.ignored_suffixes)}
        ignored.update(untrained_names(index, self.family, self.hf_config))
        return changed + sorted((index.files.keys() ^ back.keys()) - ignored)

    def rows(self) -> list[int]:
        """The samples of this data-parallel rank."""
        from megatron.core import parallel_state

        return list(range(len(LENGTHS)))[parallel_state.get_data_parallel_rank() :: self.config.data_parallel_size]

    def packed(self, forward_only: bool) -> float | None:
        """The largest difference of a log-probability in two micro-batches; gradients are left in the model."""
        rows = self.rows()
        half = len(rows) // 2
        return self._error(micro_batches([rows[:half], rows[half:]], self.hf_config.vocab_size, 80), forward_only)

    def padded(self) -> float | None:
        """The same with each sample alone, padded."""
        alone = micro_batches([[row] for row in self.rows()], self.hf_config.vocab_size, PADDED_LENGTH)
        return self._error(alone, forward_only=True)

    def _error(self, batches: list, forward_only: bool) -> float | None:
        """None where this rank's stage has no log-probabilities."""
        from megatron.core import parallel_state

        from miles.backends.megatron_utils.training import run_micro_batches
        from miles.backends.trainer.protocol import Scoring

        def weighted_sum(log_probs_N, entropy_N, packed):
            loss = (log_probs_N * weights_N()[packed.response_index_N]).sum()
            return loss, {"log_probs": log_probs_N.detach().clone(), "index": packed.response_index_N}

        scoring = Scoring(self.hf_config.vocab_size)
        with torch.set_grad_enabled(not forward_only):
            collected = run_micro_batches(self.state.chunks, batches, scoring, weighted_sum, forward_only)
        if not parallel_state.is_pipeline_last_stage():
            return None
        answers = torch.load(self.folder / "log_probs.pt")
        log_probs_N = torch.zeros_like(answers)
        for part in collected:
            log_probs_N[part["index"]] = part["log_probs"]
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        torch.distributed.all_reduce(log_probs_N, group=group)
        return (log_probs_N - answers).abs().max().item()

    def gradients(self, floor: float) -> dict[str, float]:
        """The error of each weight's gradient, see `FamilyTests.gradient_floor`. The weights are lost."""
        # Gathered like weights, the gradients come in the checkpoint's names and layouts.
        with torch.no_grad():
            for parameter in (parameter for chunk in self.chunks for parameter in chunk.parameters()):
                # A frozen one has none.
                parameter.copy_(parameter.main_grad if parameter.requires_grad else torch.zeros_like(parameter))
        expected: dict[str, torch.Tensor] = {}
        for path in (self.folder / "gradients").glob("*.safetensors"):
            expected |= load_file(path)
        # Tables of whole numbers have no gradients.
        expected = {name: tensor for name, tensor in expected.items() if tensor.is_floating_point()}
        least = floor * max(tensor.abs().max().item() for tensor in expected.values())
        return {
            name: _relative_error(tensor, expected[name], least)
            for name, tensor in self.gathered()
            if tensor.is_floating_point()
        }


def _relative_error(tensor: torch.Tensor, expected: torch.Tensor, least: float) -> float:
    """Largest difference over the largest element, or `least`; without such an element everything must be zero."""
    difference, largest = (tensor - expected).abs().max().item(), expected.abs().max().item()
    largest = max(largest, least) if largest else 0.0
    return difference / largest if largest else float("inf") if difference else 0.0


def compare(folder: Path, layout: str, floor: float) -> dict:
    """The largest differences of one case, on all ranks."""
    built = Built(folder, layout)
    for chunk in built.state.chunks:
        chunk.zero_grad_buffer()
    errors = {"weights_changed": built.weights_changed(), "packed": built.packed(False), "padded": built.padded()}
    return errors | {"gradients": built.gradients(floor)}


@contextlib.contextmanager
def world(folder: Path, layout: str, rank: int, port: int):
    """Megatron's groups of a layout, the same for each of its cases, and none afterwards."""
    from miles.backends.megatron_utils.initialize import initialize

    initialize(run_config(folder / "checkpoint", layout), rank, LAYOUTS[layout][0], f"127.0.0.1:{port}")
    yield
    leave_world()


def reports() -> bool:
    """Whether this rank is the one of its world that says what was measured."""
    from megatron.core import parallel_state

    return (
        parallel_state.is_pipeline_last_stage()
        and parallel_state.get_tensor_model_parallel_rank() == 0
        and parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0
    )


def main(rank: int, root: Path, task: dict) -> None:
    """Each rank in a world of its own, one with the cases and one with the controls; then both in all other layouts."""
    family = importlib.import_module(f"{DATA}.{task['family']}").FAMILY
    torch.set_num_threads(1)
    every, ports = sorted(folder.name for folder in root.iterdir()), iter(task["ports"])
    of_layout = {layout: family.only.get(layout, every) for layout in ("one", *task["layouts"])}
    result: dict = {"layouts": {}, "controls": {}}

    def compare_cases(layout):
        found = {case: compare(root / case, layout, family.gradient_floor) for case in of_layout[layout]}
        if reports():
            result["layouts"][layout] = found

    def run_switches(layout):
        for what, (case, its_layout, patch) in family.switches.items() if task["controls"] else ():
            if its_layout == layout:
                with patch():
                    result["controls"][what] = Built(root / case, layout).packed(forward_only=True)

    alone = [next(ports), next(ports)]
    if rank == 0 and "one" in task["layouts"]:
        with world(root / of_layout["one"][0], "one", 0, alone[0]):
            compare_cases("one")
    if rank == 1 and task["controls"]:
        with world(root / of_layout["one"][0], "one", 0, alone[1]):
            for what, (case, changes) in family.controls.items():
                result["controls"][what] = Built(root / case, "one", changes).packed(forward_only=True)
            run_switches("one")
    for layout, port in zip((layout for layout in task["layouts"] if layout != "one"), ports, strict=False):
        if rank >= LAYOUTS[layout][0]:
            continue
        with world(root / of_layout[layout][0], layout, rank, port):
            compare_cases(layout)
            run_switches(layout)
    Path(task["results"], f"{rank}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[4]), json.loads(sys.argv[5]))

"""A tiny random model of any family against transformers, in fp32: what a family's test needs.

    CASES = {"tied": Qwen3Config(**SIZES, tie_word_embeddings=True)}

    @pytest.fixture(scope="module")
    def root(tmp_path_factory):
        return prepare(tmp_path_factory.mktemp("cases"), CASES)

    @pytest.mark.parametrize("layout", ["one", "tp2_sp"])
    def test_parity(run_ranks, root, layout):
        check_parity(run_ranks, root, layout)

    def test_controls(run_ranks, root):
        check_controls(run_ranks, root, {"no window": ("tied", {"sliding_window": None})})

Compared are the log-probability of every token of eight sequences, packed and each alone with padding behind it; the
gradient of their weighted sum in every weight, under the checkpoint's names; and every weight on its way into the model
and back. Each rank runs this file.
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

from miles.utils.network import free_port

SIZES = dict(
    vocab_size=251,  # padded under tensor parallelism
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=1024,
)
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
}
LENGTHS = [100, 7, 61, 24, 33, 90, 5, 48]
# A sequence that stands alone is padded to a multiple of this.
PADDED_LENGTH = 128


def prepare(folder: Path, cases: dict, std: float = 0.15) -> Path:
    """For each case, {name: configuration of transformers}: a random checkpoint as the hub has it, and the answers.

    std: of the weights; norms are drawn around one where transformers starts them at one, else around zero.
    """
    # At these sizes two threads mostly wait for each other: ten times the time.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for name, hf_config in cases.items():
        _prepare(folder / name, hf_config, std)
    torch.set_num_threads(threads)
    return folder


def _prepare(folder: Path, hf_config, std: float) -> None:
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
            weight.normal_(center, std if weight.dim() > 1 else 0.1)
    model.save_pretrained(folder / "checkpoint")
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
    model.save_pretrained(folder / "gradients")
    torch.save(log_probs_N.detach(), folder / "log_probs.pt")


def sequences(vocab_size: int) -> list[torch.Tensor]:
    """The tokens of all samples."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, vocab_size, (length,), generator=generator) for length in LENGTHS]


def weights_N() -> torch.Tensor:
    """What each log-probability counts in the loss."""
    count = sum(LENGTHS) - len(LENGTHS)
    return torch.randn(count, generator=torch.Generator().manual_seed(2)) / count


def check_parity(
    run_ranks, root: Path, layout: str, log_prob_bound: float = 2e-5, gradient_bound: float = 1e-4, cases=None
) -> None:
    """Hold every case (or only `cases`) to the bounds: absolute of log-probabilities, relative of gradients."""
    for name, found in measure(run_ranks, root, layout, cases).items():
        print(f"{name} {layout}: {summary(found)}")
        assert found["weights_changed"] == [], f"{name}: not the same after there and back"
        assert found["packed"] < log_prob_bound and found["padded"] < log_prob_bound, f"{name}: {summary(found)}"
        wrong = {weight: error for weight, error in found["gradients"].items() if not error < gradient_bound}
        assert wrong == {}, f"{name}: {summary(found)}"


def check_controls(run_ranks, root: Path, controls: dict, layout: str = "one", least: float = 1e-3) -> None:
    """Each control, {what: (case, changed fields of config.json)}, must move a log-probability by more than `least`.

    Only our model is changed; the checkpoint must load into it all the same.
    """
    for what, (case, changes) in controls.items():
        found = measure(run_ranks, root, layout, [case], changes)[case]
        print(f"{what}: {summary(found)}")
        assert max(found["packed"], found["padded"]) > least, f"{what} makes no difference: {summary(found)}"


def summary(found: dict) -> str:
    """The largest differences of one case."""
    worst = max(found["gradients"], key=found["gradients"].get)
    return (
        f"log-probabilities {found['packed']:.1e} packed, {found['padded']:.1e} padded; "
        f"gradients {found['gradients'][worst]:.1e} ({worst})"
    )


def measure(run_ranks, root: Path, layout: str, cases=None, changes: dict | None = None) -> dict[str, dict]:
    """{case: largest differences}; changes: fields of the configuration that our model is built with."""
    names = [folder.name for folder in sorted(root.iterdir())] if cases is None else list(cases)
    result = root / names[0] / "result.json"
    result.unlink(missing_ok=True)
    arguments = json.dumps({"layout": layout, "cases": names, "changes": changes or {}, "result": str(result)})
    run_ranks(__file__, LAYOUTS[layout][0], str(root), f"127.0.0.1:{free_port()}", arguments)
    return json.loads(result.read_text())


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


def compare(folder: Path, layout: str, changes: dict) -> dict:
    """The largest differences of one case, on all ranks."""
    from megatron.core import parallel_state

    from miles.backends.megatron_utils.families import family_for
    from miles.backends.megatron_utils.hf_weights import load_into, untrained_names
    from miles.backends.megatron_utils.model import build_model, build_train_state, parallel_info
    from miles.backends.megatron_utils.training import run_micro_batches
    from miles.backends.trainer.protocol import Scoring
    from miles.hf.checkpoint import CheckpointIndex
    from miles.hf.config import load_hf_config
    from miles.weight_sync.source import live
    from tests.fast.weight_sync.conftest import hf_tensors

    checkpoint = folder / "checkpoint"
    hf_config = load_hf_config(checkpoint)
    for name, value in changes.items():
        setattr(hf_config, name, value)
    config, family = run_config(checkpoint, layout), family_for(hf_config)
    chunks = build_model(config, hf_config)
    parallel = parallel_info(chunks[0].config)
    load_into(chunks, family, hf_config, checkpoint, parallel)
    index = CheckpointIndex(checkpoint)
    back = {name: tensor.clone() for name, tensor in hf_tensors(chunks, family, hf_config, parallel, index, live)}
    changed = sorted(name for name in index.files if name in back and not torch.equal(back[name], index.read(name)))
    state = build_train_state(config, chunks, total_steps=1)
    scoring = Scoring(hf_config.vocab_size)

    def weighted_sum(log_probs_N, entropy_N, packed):
        loss = (log_probs_N * weights_N()[packed.response_index_N]).sum()
        return loss, {"log_probs": log_probs_N.detach().clone(), "index": packed.response_index_N}

    mine = list(range(len(LENGTHS)))[parallel_state.get_data_parallel_rank() :: config.data_parallel_size]
    half = len(mine) // 2
    for chunk in state.chunks:
        chunk.zero_grad_buffer()
    packed = micro_batches([mine[:half], mine[half:]], hf_config.vocab_size, 80)
    alone = micro_batches([[row] for row in mine], hf_config.vocab_size, PADDED_LENGTH)
    answers = torch.load(folder / "log_probs.pt")
    # Names that a checkpoint lists and that are no weights of ours.
    ignored = {name for name in index.files if name.endswith(family.ignored_suffixes)}
    ignored.update(untrained_names(index, family, hf_config))
    result = {"weights_changed": changed + sorted((index.files.keys() ^ back.keys()) - ignored)}
    for name, batches, forward_only in (("packed", packed, False), ("padded", alone, True)):
        with torch.set_grad_enabled(not forward_only):
            collected = run_micro_batches(state.chunks, batches, scoring, weighted_sum, forward_only)
        if parallel_state.is_pipeline_last_stage():
            log_probs_N = torch.zeros_like(answers)
            for part in collected:
                log_probs_N[part["index"]] = part["log_probs"]
            torch.distributed.all_reduce(
                log_probs_N, group=parallel_state.get_data_parallel_group(with_context_parallel=True)
            )
            result[name] = (log_probs_N - answers).abs().max().item()
    # Gathered like weights, the gradients come in the checkpoint's names and layouts.
    with torch.no_grad():
        for parameter in (parameter for chunk in chunks for parameter in chunk.parameters()):
            # A frozen one has none.
            parameter.copy_(parameter.main_grad if parameter.requires_grad else torch.zeros_like(parameter))
    expected: dict[str, torch.Tensor] = {}
    for path in (folder / "gradients").glob("*.safetensors"):
        expected |= load_file(path)
    result["gradients"] = {
        name: _relative_error(tensor, expected[name])
        for name, tensor in hf_tensors(chunks, family, hf_config, parallel, index, live)
    }
    return result


def _relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference over the largest element; without such an element everything must be zero."""
    difference, largest = (found - expected).abs().max().item(), expected.abs().max().item()
    return difference / largest if largest else float("inf") if difference else 0.0


def main(rank: int, world_size: int, root: Path, master: str, arguments: dict) -> None:
    """One rank: every case in turn; a rank of the last pipeline stage writes what was found."""
    from megatron.core import parallel_state

    from miles.backends.megatron_utils.initialize import initialize

    torch.set_num_threads(1)
    layout, cases = arguments["layout"], arguments["cases"]
    initialize(run_config(root / cases[0] / "checkpoint", layout), rank, world_size, master)
    found = {case: compare(root / case, layout, arguments["changes"]) for case in cases}
    if parallel_state.is_pipeline_last_stage() and parallel_state.get_tensor_model_parallel_rank() == 0:
        if parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0:
            Path(arguments["result"]).write_text(json.dumps(found))
    torch.distributed.barrier()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[4]), sys.argv[5], json.loads(sys.argv[6]))

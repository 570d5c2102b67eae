"""TRL's GRPOTrainer with transformers' generation on what a Miles configuration says; trl_peer.py runs it on its own.

    python benchmarks/trl_loop.py --config RUN.yaml --rollouts 6 --output seconds.json [--trl '{"bf16": false}']

Model, prompts and their order, reward, group size, lengths, batch, optimizer, schedule and clipping are the
configuration's. Everything is in memory, nothing is logged or saved, no gradient checkpointing. On a GPU the weights
are float32 under bfloat16 autocast, as TRL loads them by default; --trl changes any field of GRPOConfig. Writes a list
with one entry a rollout: seconds by phase, response tokens.
"""

import argparse
import asyncio
import json
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from miles.config import RunConfig
from miles.rewards.compute import load_reward
from miles.rollout.prompts.data_source import RolloutDataSource
from miles.utils.arguments import parse_args
from miles.utils.types import Sample


def now() -> float:
    """Seconds of the clock, once the GPU has done what it was given."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


class TimedTrainer(GRPOTrainer):
    """GRPOTrainer that notes when each rollout begins and how long its parts take."""

    def __init__(self, *args: Any, **kwargs: Any):
        self.rollouts: list[dict[str, float]] = []
        super().__init__(*args, **kwargs)

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        start = now()
        result = super()._generate_single_turn(*args, **kwargs)
        self.rollouts[-1]["generate"] = now() - start
        self.rollouts[-1]["tokens"] = sum(map(len, result[0]))
        return result

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        start = now()
        self.rollouts.append({"start": start})
        result = super()._generate_and_score_completions(inputs)
        self.rollouts[-1]["score"] = now() - start - self.rollouts[-1]["generate"]
        return result

    def seconds(self, end: float) -> list[dict[str, float]]:
        """One entry a rollout: `step` from its beginning to the next one's, of which `train` is what is left."""
        starts = [rollout["start"] for rollout in self.rollouts] + [end]
        result = []
        for rollout, start, after in zip(self.rollouts, starts, starts[1:], strict=False):
            step = after - start
            parts = {"generate": rollout["generate"], "score": rollout["score"]}
            result.append(parts | {"train": step - sum(parts.values()), "step": step, "tokens": rollout["tokens"]})
        return result


class LastStep(TrainerCallback):
    """The time at which the last optimizer step was done."""

    end = 0.0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == state.max_steps:
            self.end = now()


def prompt_set(config: RunConfig, tokenizer: Any, rollouts: int) -> Dataset:
    """The prompts of Miles' first rollouts in their order, as rendered text, with their labels."""
    source = RolloutDataSource(config, tokenizer)
    samples = [group[0] for _ in range(rollouts) for group in source.get_samples(config.rollout_batch_size)]
    again = tokenizer([sample.prompt for sample in samples])["input_ids"]
    assert again == [sample.tokens for sample in samples], "TRL would send other prompt tokens than Miles"
    return Dataset.from_list([{"prompt": sample.prompt, "label": sample.label} for sample in samples])


def reward_function(config: RunConfig, end_id: int) -> Any:
    """The configuration's reward as TRL calls one."""
    reward = load_reward(config)

    async def all_rewards(samples: list[Sample]) -> list[float]:
        return await asyncio.gather(*(reward(config, sample) for sample in samples))

    def rewards(completions: list[str], completion_ids: list[list[int]], label: list[str], **_: Any) -> list[float]:
        samples = [
            Sample(
                response=text,
                label=answer,
                status=Sample.Status.COMPLETED if ids[-1] == end_id else Sample.Status.TRUNCATED,
            )
            for text, ids, answer in zip(completions, completion_ids, label, strict=True)
        ]
        return asyncio.run(all_rewards(samples))

    return rewards


def trl_settings(config: RunConfig, rollouts: int, folder: Path) -> dict[str, Any]:
    """GRPOConfig's fields that make TRL do what `config` says: the token mean of each optimizer step's batch."""
    return {
        "output_dir": str(folder),
        "seed": config.seed,
        "use_cpu": config.device == "cpu",
        "bf16": config.device != "cpu",
        "per_device_train_batch_size": config.global_batch_size,
        "gradient_accumulation_steps": 1,
        "steps_per_generation": config.steps_per_rollout,
        "max_steps": rollouts * config.steps_per_rollout,
        "num_generations": config.n_samples_per_prompt,
        "max_completion_length": config.rollout_max_response_len,
        "temperature": config.rollout_temperature,
        "shuffle_dataset": False,
        "loss_type": "bnpo",
        "beta": 0.0,
        "epsilon": config.eps_clip,
        "epsilon_high": config.eps_clip_high,
        "learning_rate": config.lr,
        "lr_scheduler_type": "constant_with_warmup",
        "warmup_steps": config.lr_warmup_iters,
        "adam_beta1": config.adam_beta1,
        "adam_beta2": config.adam_beta2,
        "weight_decay": config.weight_decay,
        "max_grad_norm": config.clip_grad,
        "gradient_checkpointing": False,
        "logging_strategy": "no",
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
    }


def main() -> None:
    command = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    command.add_argument("--config", required=True, help="YAML file with the flags of train.py")
    command.add_argument("--rollouts", type=int, required=True, help="rollouts to train on")
    command.add_argument("--output", type=Path, required=True, help="JSON file to write")
    command.add_argument("--threads", type=int, help="threads of torch (default: its own)")
    command.add_argument("--trl", type=json.loads, default={}, metavar="JSON", help="fields of GRPOConfig to change")
    options = command.parse_args()
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    config = parse_args(["--config", options.config])
    tokenizer = AutoTokenizer.from_pretrained(config.hf_checkpoint)
    settings = trl_settings(config, options.rollouts, options.output.parent / "trl") | options.trl
    last = LastStep()
    trainer = TimedTrainer(
        model=str(config.hf_checkpoint),
        reward_funcs=reward_function(config, tokenizer.eos_token_id),
        args=GRPOConfig(**settings),
        train_dataset=prompt_set(config, tokenizer, options.rollouts),
        processing_class=tokenizer,
        callbacks=[last],
    )
    trainer.train()
    options.output.write_text(json.dumps(trainer.seconds(last.end)))


if __name__ == "__main__":
    main()

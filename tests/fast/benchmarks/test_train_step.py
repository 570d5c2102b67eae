"""The work that benchmarks/train_step.py counts is what torch counts in a step of transformers' model."""

import sys
from pathlib import Path

import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


def test_work_of_a_step(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setattr(sys, "path", [*sys.path])  # the benchmark adds the root to it
    import train_step
    from sleep_wake import SIZES
    from slices import write_config

    length, prompt = train_step.TINY_LENGTH, train_step.TINY_PROMPT
    hidden, layers, _, heads, _, vocabulary, _ = SIZES["tiny"]
    write_config(tmp_path, "tiny")
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path), attn_implementation="eager")
    with FlopCounterMode(display=False) as counter:
        model(torch.zeros(2, length, dtype=torch.int64)).logits.sum().backward()
    # It also computes the prompts' logits, the half of the scores that causal attention doesn't need, and angles.
    unneeded = 6 * hidden * vocabulary * 2 * prompt + 6 * layers * hidden * length**2 * 2
    unneeded += 2 * hidden // heads // 2 * length
    assert counter.get_total_flops() == train_step.step_flops("tiny", 2 * length) + unneeded

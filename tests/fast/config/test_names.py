"""What an unknown name may have meant, over the real flags."""

import pytest

from miles.config.command_line import KNOWN_FLAGS
from miles.config.names import nearest

# What they got when letters were counted alone: flags of another meaning.
FAR = {
    "--optimizer": "--reset-optimizer-states",
    "--hidden-size": "--ddp-bucket-size",
    "--vocab-size": "--micro-batch-size",
    "--normalization": "--normalize-advantages",
    "--rotary-base": "--rollout-batch-size",
    "--norm-epsilon": "--num-epoch",
    "--num-experts": "--num-rollout",
    "--hidden-dropout": "--num-rollout",
    "--moe-router-topk": "--moe-router-dtype",
    "--moe-grouped-gemm": "--group-rm",
    "--optimizer-cpu-offload": "--no-offload",
    "--no-rope-fusion": "--no-bias-swiglu-fusion",
    "--wandb-group": "--no-group-rm",
    "--wandb-key": "--label-key",
    "--spec": "--save",
    "--dump-details": "--adam-beta2",
    "--deterministic-mode": "--critic-load",
    "--softmax-type": "--loss-type",
    "--allgather-cp": "--value-clip",
}


def test_every_flag_is_found_by_each_prefix_that_is_its_own():
    prefixes = 0
    for flag in KNOWN_FLAGS:
        words = flag.removeprefix("--").split("-")
        for count in range(1, len(words)):
            prefix = "--" + "-".join(words[:count])
            if [known for known in KNOWN_FLAGS if known.startswith(prefix)] == [flag]:
                prefixes += 1
                found = nearest(prefix, KNOWN_FLAGS)
                assert found.removeprefix("; did you mean ").split(" or ")[0].rstrip("?") == flag, (prefix, found)
    assert prefixes >= 300


@pytest.mark.parametrize(
    "wrong, first",
    [
        ("--rollout-batchsize", "--rollout-batch-size"),
        ("--rolout-temp", "--rollout-temperature"),
        ("--adam_eps", "--adam-eps"),
        ("--update-weights-buffer", "--update-weight-buffer-size"),
        ("--tensor-parallel-size", "--tensor-model-parallel-size"),
        ("--eval-interval-steps", "--eval-interval"),
        ("--no-offlod-train", "--no-offload-train"),
        ("--deviec", "--device"),
        ("--group-mr", "--group-rm"),
    ],
)
def test_slips_and_missing_words(wrong, first):
    assert nearest(wrong, KNOWN_FLAGS).startswith(f"; did you mean {first}"), nearest(wrong, KNOWN_FLAGS)


def test_what_turns_off_is_not_near_to_what_turns_on():
    assert nearest("--offlaod-train", KNOWN_FLAGS).count("--no-") == 0
    assert nearest("--no-colocat", KNOWN_FLAGS) == "; did you mean --no-colocate?"
    assert nearest("no_save_opt", ["no_save_optim", "save_optim"]) == "; did you mean no_save_optim?"

    assert nearest("--enable-rewards-normalization", KNOWN_FLAGS) == ""
    assert "--disable-rewards-normalization" in nearest("--disable-reward-normalization", KNOWN_FLAGS)


@pytest.mark.parametrize(("wrong", "other"), FAR.items())
def test_what_only_shares_letters_is_not_suggested(wrong, other):
    assert other in KNOWN_FLAGS and other not in nearest(wrong, KNOWN_FLAGS)


def test_of_sglangs_flags_the_name_says_nothing():
    known = ["--sglang-dsa-decode-backend", "--sglang-deepep-config", "--sglang-cuda-graph-bs-decode"]
    assert nearest("--sglang-nsa-decode-backend", known) == "; did you mean --sglang-dsa-decode-backend?"
    assert nearest("--sglang-cuda-graph-bs", known) == "; did you mean --sglang-cuda-graph-bs-decode?"
    assert nearest("--sglang-config", known) == ""

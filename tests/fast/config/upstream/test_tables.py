"""The tables among themselves, and over the 166 flags of Miles' and slime's recipes that are none of ours.

`flags.txt` has them, one a line.
"""

from pathlib import Path

import pytest

from miles.config.command_line import KNOWN_FLAGS, read_command_line
from miles.config.resolve import ConfigError, resolve
from miles.config.sglang_args import server_arguments
from miles.config.upstream.absent import ABSENT, ABSENT_VALUES
from miles.config.upstream.flags import ANYWAY, MEANT, MODEL, RENAMED

FLAGS = (Path(__file__).parent / "flags.txt").read_text().split()


def test_all_are_there():
    assert len(FLAGS) == len(set(FLAGS)) == 166


def test_each_is_taken_or_has_a_sentence_of_its_own(argv):
    """None is only unknown, and so none is told another name, which might mislead."""
    misled = {}
    for flag in FLAGS:
        try:
            resolve(argv(f"{flag} 1"))
        except ConfigError as error:
            misled |= {
                problem: flag for problem in error.problems if "is unknown" in problem or "did you mean" in problem
            }
    assert misled == {}


def test_a_flag_stands_in_one_table():
    known = {*KNOWN_FLAGS, *(f"--sglang-{name.replace('_', '-')}" for name in server_arguments())}
    assert not set(MODEL) & set(ANYWAY)
    assert not {*MEANT, *RENAMED} & known
    rows = [flag for row in ABSENT for flag in row.flags]
    assert len(rows) == len(set(rows))
    for start in rows:
        covered = [
            flag for flag in (*known, *MEANT) if flag == start or (start.endswith("-") and flag.startswith(start))
        ]
        assert not covered, start
    assert all(new in KNOWN_FLAGS for new in RENAMED.values())


def test_what_is_used_in_its_place_is_there():
    texts = [row.use for row in ABSENT] + list(ABSENT_VALUES.values())
    named = {word.strip(",;.") for text in texts for word in text.split() if word.startswith("--")}
    assert named <= set(KNOWN_FLAGS), named - set(KNOWN_FLAGS)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            "--lora-rank 16 --lr 1 --target-modules all-linear",
            "--lora-rank, --target-modules are known from Miles, not",
        ),
        ("--multi-lora-n-adapters 2", "--multi-lora-n-adapters is known from Miles, not here: training of adapters"),
        ("--sglang-config a.yaml", "--sglang-config is known from Miles, not here: engines of several kinds"),
        ("--eval-sglang-mem-fraction-static 0.5", "is known from Miles, not here: engines for evaluations alone"),
        ("--use-fault-tolerance --use-fault-tolerance", "--use-fault-tolerance is known from Miles, not here"),
    ],
)
def test_one_sentence_a_feature(words, sentence):
    (problem,) = read_command_line(words.split()).problems
    assert sentence in problem


def test_in_a_file_too(argv, folder):
    (folder / "run.yaml").write_text("lora_rank: 16\n")
    with pytest.raises(ConfigError, match=r"run.yaml: --lora-rank is known from Miles, not here") as caught:
        resolve(argv("--config run.yaml"))
    assert len(caught.value.problems) == 1


def test_a_value_that_is_taken_for_another_shows_what_was_written(argv):
    resolved = resolve(argv("--moe-token-dispatcher-type flex --sequence-parallel --lr 1"))
    assert resolved.config.moe_token_dispatcher_type == "alltoall" and resolved.config.sequence_parallel is False
    assert resolved.provenance["sequence_parallel"].startswith("in place of --sequence-parallel (")
    assert resolved.provenance["moe_token_dispatcher_type"].startswith("in place of --moe-token-dispatcher-type flex (")
    assert "lr" in resolved.config.given and "sequence_parallel" not in resolved.config.given

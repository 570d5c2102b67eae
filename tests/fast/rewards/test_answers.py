"""dapo, deepscaler, f1, gpqa and boxed: what their answers are worth."""

import time

import pytest

from miles.rewards import BUILT_IN, built_in
from miles.rewards.answers import after_thinking, last_box
from miles.rewards.compute import compute_rewards
from miles.rewards.dapo import dapo_reward, normalize
from miles.rewards.f1 import f1_reward
from miles.rewards.gpqa import find_choice, gpqa_reward
from miles.utils.types import Sample


@pytest.mark.parametrize(
    ("text", "box"),
    [
        (r"\boxed{4}", "4"),
        (r"\fbox{ 4 }", "4"),
        (r"\boxed {4}", "4"),
        (r"\boxed{\frac{1}{2}} then \fbox{5}", "5"),
        (r"\boxed{\{1, \{2\}\}}", r"\{1, \{2\}\}"),
        (r"\boxed{a\\}", r"a\\"),
        (r"\boxed{\boxed{4}}", "4"),
        (r"\boxed{答案}", "答案"),
        (r"\boxed{" + "{" * 5000 + "4" + "}" * 5000 + "}", "{" * 5000 + "4" + "}" * 5000),
        (r"\boxed{4", None),
        (r"\boxed{3} \boxed{4", None),
        (r"\boxed{\frac{1}{2}", None),
        (r"\boxed 4", None),
        (r"\boxed{}", ""),
        (r"\boxed", None),
        ("", None),
    ],
)
def test_last_box(text, box):
    assert last_box(text) == box


def test_after_thinking():
    assert after_thinking("<think>a</think>b</think>c") == "c"
    assert after_thinking("a</think>") == ""
    assert after_thinking("<think>a") is None


DAPO = [
    ("Answer: 42", "42", 1),
    ("so\nAnswer: $42$", "42", 1),
    ("ANSWER : 42.\n", "42", 1),
    (r"Answer: \boxed{42}", "42", 1),
    ("Answer: 41\nAnswer: 42", "42", 1),
    ("Answer: 42\nAnswer: 41", "42", -1),
    ("Answer: 42 or 41", "42", -1),
    ("Answer: 41, 42", "42", -1),
    ("Answer: 42 degrees", "42", 1),
    ("Answer: 1,000", "1000", 1),
    ("Answer: (1,000)", "(1000)", -1),
    ("Answer: x = 42", "42", 1),
    (r"Answer: \frac12", r"\frac{1}{2}", 1),
    (r"Answer: \dfrac{1}{2}", r"\frac12", 1),
    (r"Answer: \sqrt2", r"\sqrt{2}", 1),
    (r"Answer: \text{east}", "east", 1),
    (r"Answer: $\left(1, 2\right)$", "(1,2)", 1),
    ("Answer: 0.5", "1/2", -1),
    ("42", "42", -1),
    ("Answer: 42" + "." * 300, "42", -1),
    ("Answer:", "42", -1),
    ("Answer:\n42", "42", 1),
    ("**Answer:**\n\n42\n\nHope that helps", "42", 1),
    ("Answer:\n$$\n42\n$$", "42", 1),
    ("Answer:\n\\[\n42\n\\]\n", "42", 1),
    ("Answer: 42\nAnswer:", "42", -1),
    ("Answer:\nAnswer: 42", "42", 1),
    ("Answer：４２", "42", 1),
    ("Answer: −7", "-7", 1),
    ("Answer: −7", "7", -1),
    ("Answer: －7", "-7", 1),
    ("Answer: –7", "-7", 1),
    ("Answer: 5–7", "-2", -1),
    ("Answer: 5–7", "57", -1),
    ("Answer: 1{,}234", "1234", 1),
    ("Answer: 1{,}234,567", "1,234,567", -1),
    (r"Answer: $7\,500$", "7500", 1),
    ("Answer: 7 500", "7,500", 1),
    ("Answer: 31/4", "3 1/4", -1),
    ("Answer: 3 1/4", "3 1/4", 1),
    ("Answer: 12", "1 2", -1),
    (r"Answer: 3\frac14", r"3 \frac{1}{4}", 1),
    ("Answer: x >= 42", "42", -1),
    ("Answer: x + g", "x+m", -1),
    ("Answer: a + 1", "+1", -1),
    ("Answer: in", "m", -1),
    ("Answer: 6 m", "6", 1),
    (r"Answer: 6 \text{ square units}", "6", 1),
    (r"Answer: $90^\circ$", "90", 1),
    (r"Answer: $90^{\circ}$.", "90", 1),
    ("Answer: 50%", "50", 1),
    ("Answer: a square", "square", 1),
    ("Answer: 5 squared", "5", -1),
    ("", "42", -1),
]


@pytest.mark.parametrize(("response", "label", "score"), DAPO)
async def test_dapo(response, label, score):
    reward = await dapo_reward(None, Sample(response=response, label=label))
    assert (reward["score"], reward["acc"]) == (score, float(score == 1))


async def test_dapo_by_both_keys(engine_config):
    for key, evaluation, expected in (("score", False, [1, -1]), ("acc", True, [1, 0])):
        update = {"rm_type": "dapo", "reward_key": "score", "eval_reward_key": "acc"}
        samples = [Sample(index=i, response=f"Answer: {i}", label="0") for i in range(2)]
        counts = await compute_rewards(engine_config.model_copy(update=update), samples, evaluation=evaluation)
        assert [sample.reward for sample in samples] == expected, key
        assert counts.errors == 0
        assert samples[1].metadata["reward"] == {"score": -1.0, "acc": 0.0, "pred": "1"}


async def test_dapo_needs_a_label_with_something_in_it():
    assert normalize(" $ $ ") == "" and normalize("a dollar") == "dollar"
    with pytest.raises(ValueError, match="nothing is left of the label"):
        await dapo_reward(None, Sample(response="Answer:", label=r"\boxed{}"))


@pytest.mark.parametrize(
    ("response", "label", "reward"),
    [
        ("Paris", "Paris", 1),
        ("the PARIS!", "Paris", 1),
        ("Paris, France", "Paris", 2 / 3),
        ("It is Paris", "Paris", 0.5),
        ("Paris Paris", "Paris", 2 / 3),
        ("Paris Paris", "Paris Paris", 1),
        ("London", "Paris", 0),
        ("", "Paris", 0),
        ("the", "Paris", 0),
        ("yes", "yes", 1),
        ("yes and no", "yes", 0),
        ("no", "yes", 0),
        ("Straße", "STRASSE", 1),
        ("ﬁnal", "final", 1),
        ("«München»…", "münchen", 1),
        ("42 " * 100_000, "42", 2 / 100_001),
    ],
)
async def test_f1(response, label, reward):
    assert await f1_reward(None, Sample(response=response, label=label)) == pytest.approx(reward)


async def test_f1_of_a_label_without_words_is_an_error():
    with pytest.raises(ValueError, match="the label 'the!' has no words"):
        await f1_reward(None, Sample(response="", label="the!"))


GPQA = [
    ("B", "B"),
    ("b", "B"),
    ("(B)", "B"),
    ("So it must be this one.\n**B**", "B"),
    ("B.", "B"),
    (r"\boxed{B}", "B"),
    (r"\boxed{\text{B}}", "B"),
    (r"\boxed{(b)}", "B"),
    (r"\boxed{\mathbf{B}}", "B"),
    (r"\boxed{\mathrm{(B)}}", "B"),
    (r"\boxed{\textbf{(B)}\ 5}", "B"),
    (r"\boxed{\textbf{(B) } 5 \text{ m}}", "B"),
    (r"\boxed{\boldsymbol{B}}", "B"),
    (r"\boxed{{\bf B}}", "B"),
    (r"\boxed{\text{B: Paris}}", "B"),
    (r"\boxed{B: 5 m}", "B"),
    (r"\boxed{(B) 5 m}", "B"),
    (r"\boxed{A: 5, B: 6}", None),
    (r"\boxed{(A) and (B)}", None),
    (r"\boxed{B 5}", None),
    (r"\boxed{Banana: yes}", None),
    (r"\boxed{\frac{B}{2}}", None),
    (r"\boxed{\mathbf{B}", None),
    (r"The answer is $\mathbf{B}$.", "B"),
    (r"Answer: \textbf{(B)}", "B"),
    ("Answer: B: Paris", "B"),
    ("Answer: **B: Paris**", "B"),
    ("Answer：Ｂ", "B"),
    ("It is in France.\nB: Paris", "B"),
    ("It is in France.\n**(B)** Paris", "B"),
    ("A: Lyon\nB: Paris", None),
    ("So: A: Lyon\nB: Paris or C: Rome", None),
    (r"\boxed{B, C}", None),
    (r"\boxed{ABCD}", None),
    (r"The answer is A. \boxed{}", None),
    ("The answer is B.", "B"),
    ("The answer is (B), since A is wrong.", "B"),
    ("The answer is B because it fits.", "B"),
    ("**Answer:** B", "B"),
    ("Answer: **B**", "B"),
    ("**Answer: (B)**", "B"),
    ("Answer: $B$", "B"),
    ("The correct choice is C", "C"),
    ("Answer: A\nAnswer: B", "B"),
    ("<think>Answer: A</think>Answer: B", "B"),
    ("Answer: A, B, C, D", None),
    ("Answer: A or B", None),
    ("Answer: (A) and (B)", None),
    ("Answer: A/B", None),
    ("Answer: A. or B", None),
    ("Answer: A good one would be B", None),
    ("The answer is a mystery", None),
    ("The answer is Banana", None),
    ("Answer: B'", None),
    ("Answer: В", None),  # a Cyrillic letter
    ("A B C D", None),
    ("It could be B", None),
    ("", None),
]


@pytest.mark.parametrize(("text", "choice"), GPQA)
def test_choices(text, choice):
    assert find_choice(text) == choice


async def test_gpqa():
    for label in ("B", "b", "(B)", " B. ", r"\boxed{B}", r"$\mathbf{B}$"):
        assert await gpqa_reward(None, Sample(response="Answer: B", label=label)) == 1
        assert await gpqa_reward(None, Sample(response="Answer: C", label=label)) == 0
        assert await gpqa_reward(None, Sample(response="none", label=label)) == 0
    for label in ("", "AB", "1", "Paris"):
        with pytest.raises(ValueError, match="is not the letter of a choice"):
            await gpqa_reward(None, Sample(response="A", label=label))


@pytest.mark.parametrize(
    ("name", "response", "label", "reward"),
    [
        ("deepscaler", r"<think>hm</think>\boxed{\frac{1}{2}}", "0.5", 1),
        ("deepscaler", r"<think>\boxed{4}</think> 4", "4", 0),
        ("deepscaler", r"<think>\boxed{4}</think>\boxed{5}", "4", 0),
        ("deepscaler", r"</think>\boxed{5}</think>\boxed{4}", "4", 1),
        ("deepscaler", r"\boxed{4}", "4", 0),
        ("deepscaler", r"</think>\boxed{4", "4", 0),
        ("deepscaler", "", "4", 0),
        ("gemma_math", r"<|channel>thought\n\boxed{5}<channel|>\boxed{4}", "4", 1),
        ("gemma_math", r"<|channel>thought\n\boxed{4}<channel|>\boxed{5}", "4", 0),
        ("gemma_math", r"<|channel>thought\n4", "4", 0),
        ("gemma_math", r"<|channel>a<channel|>\boxed{5}<|channel>b<channel|>The answer is 0.5", r"\frac12", 1),
        ("gemma_math", r"<|channel>a<channel|>\boxed{4}<|channel>b", "4", 0),
        ("gemma_math", r"so it is \boxed{4}", "4", 1),
        ("gemma_math", "", "4", 0),
        ("boxed_math", r"\boxed{2/4}, as was to be shown", "1/2", 1),
        ("boxed_math", "the answer is 4", "4", 0),
        ("boxed_exact", r"so \boxed{a{b}}", "a{b}", 1),
        ("boxed_exact", "a", "a", 0),
        ("boxed_exact", r"\boxed{4}", r"\boxed{4}", 1),
        ("boxed_exact", r"\boxed{4}", r"So it is $\boxed{4}$.", 1),
        ("boxed_exact", r"\boxed{4}", r"\fbox{5}", 0),
        ("boxed_f1", r"\boxed{Paris}", r"\boxed{Paris}", 1),
        ("boxed_gpqa", r"\boxed{C}", r"\boxed{C}", 1),
        ("boxed_math", r"\boxed{0.5}", r"\boxed{\frac12}", 1),
        ("boxed_math", r"\boxed{x = 5 \text{ or } x = 7}", "5, 7", 1),
        ("boxed_math", r"\boxed{5 or 7}", "7", 0),
        ("boxed_math", r"\boxed{\frac{3}{4}", "3/4", 0),
        ("deepscaler", r"</think>\boxed{−7}", "-7", 1),
        ("deepscaler", r"</think>\boxed{2x}", "2", 0),
        ("boxed_f1", r"\boxed{the Paris}", "Paris", 1),
        ("boxed_gpqa", r"\boxed{C}", "C", 1),
        ("boxed_gpqa", "Answer: C", "C", 0),
    ],
)
async def test_boxed_deepscaler_and_gemma_math(engine_config, name, response, label, reward):
    config = engine_config.model_copy(update={"rm_type": name})
    sample = Sample(response=response, label=label, status=Sample.Status.COMPLETED)
    counts = await compute_rewards(config, [sample])
    assert (sample.reward, counts.first_error) == (reward, None)


UNUSABLE = {
    "exact": ["", "  "],
    "math": ["", "The answer is 6", "12 5", "{", "???", r"\boxed{3"],
    "dapo": ["", "$$", r"\boxed{}"],
    "deepscaler": ["", "June 20"],
    "gemma_math": ["", "{"],
    "f1": ["", "the!"],
    "gpqa": ["", "AB", "1", r"\boxed{AB}"],
    "code": ["", "{}", "print(1)"],
    "boxed_exact": ["", r"\boxed{}", r"\boxed{3"],
    "boxed_math": ["", r"\boxed{}", r"\boxed{3"],
    "boxed_f1": ["", r"\boxed{the}", r"\boxed{Paris"],
    "boxed_gpqa": ["", r"\boxed{AB}"],
}


def test_every_reward_that_compares_with_labels_says_which_it_can_use():
    assert set(UNUSABLE) <= {name for name, reward in BUILT_IN.items() if reward.read_label is not None}
    for name, labels in UNUSABLE.items():
        for label in labels:
            with pytest.raises(ValueError, match="label"):
                built_in(name).check_label(label)
        with pytest.raises(ValueError, match="the sample has none"):
            built_in(name).check_label(None)
    for name in ("remote_rm", "reasoning_gym"):
        built_in(name).check_label(None)
    for name in ("maths", None, ["math"]):
        with pytest.raises(ValueError, match="it must be one of exact, math"):
            built_in(name)


@pytest.mark.parametrize(
    ("name", "labels"),
    [
        ("math", ["4", "3 1/4", "6 dollars", r"\frac{1}{2}", "(1, 2]", "east", "x = 3", "#### 4", r"\boxed{4}"]),
        ("boxed_exact", ["4", r"\boxed{4}"]),
        ("gpqa", ["B", r"\boxed{B}"]),
        ("dapo", ["a", "4", r"\text{east}"]),
    ],
)
def test_usable_labels(name, labels):
    for label in labels:
        built_in(name).check_label(label)


@pytest.mark.parametrize("name", ["exact", "dapo", "deepscaler", "f1", "gpqa", "boxed_exact", "boxed_gpqa", "boxed_f1"])
@pytest.mark.parametrize(
    "part",
    [r"\boxed{", "Answer: ", "{", "}", "the ", r"\\", "$", "</think>", "ﷺ", "(", "* ", "\n", "_", "\0", "\ud800"],
)
async def test_rambling_is_judged_in_time(name, part):
    sample = Sample(response=part * (200_000 // len(part)), label="B")
    start = time.process_time()
    reward = await BUILT_IN[name].judge(None, sample)
    assert (reward["acc"] if isinstance(reward, dict) else reward) == 0
    assert time.process_time() - start < 5

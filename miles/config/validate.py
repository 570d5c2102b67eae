"""What a configuration must satisfy. Each rule says what was given, what is allowed and what to do."""

from collections.abc import Iterator

from miles.config.debug_rules import DEBUG_RULES
from miles.config.effect import effect_rules
from miles.config.eval_rules import EVAL_RULES, eval_warnings
from miles.config.hooks_rules import HOOKS_RULES
from miles.config.multi_turn_rules import MULTI_TURN_RULES, multi_turn_warnings
from miles.config.offload_rules import OFFLOAD_RULES, offload_warnings
from miles.config.path_rules import PATH_RULES
from miles.config.rollout_rules import ROLLOUT_RULES, rollout_warnings
from miles.config.run_config import SECTIONS, RunConfig
from miles.config.section import Rule, Section
from miles.config.values import Undetermined, Values
from miles.utils.export_folder import export_problem

FIELDS = RunConfig.model_fields


def rules_of(section: type[Section]) -> list[Rule]:
    """What refuses the fields of one section: their annotations, then its rules."""
    return effect_rules(section, FIELDS, warns=False) + section.rules()


WARNINGS: list[Rule] = [
    one for section in SECTIONS for one in (*effect_rules(section, FIELDS, warns=True), *section.warnings())
]
RULES: list[Rule] = [
    *(one for section in SECTIONS for one in rules_of(section)),
    *PATH_RULES,
    *OFFLOAD_RULES,
    *DEBUG_RULES,
    *ROLLOUT_RULES,
    *HOOKS_RULES,
    *MULTI_TURN_RULES,
    *EVAL_RULES,
]


def _rule(function: Rule) -> Rule:
    RULES.append(function)
    return function


def validate(v: Values) -> list[str]:
    """Every problem of a configuration; a rule that reads a value which is not known has nothing to say."""
    problems = []
    for rule in RULES:
        try:
            problems += rule(v)
        except Undetermined:
            continue
    return problems


def warn(v: Values) -> Iterator[str]:
    """What is allowed, and probably not meant."""
    for one in WARNINGS:
        yield from one(v)
    yield from eval_warnings(v)
    yield from multi_turn_warnings(v)
    yield from offload_warnings(v)
    yield from rollout_warnings(v)


# --- rollout ---


@_rule
def _lengths(v: Values) -> Iterator[str]:
    if v.needs_engines and v.rollout_max_response_len is None:
        yield "--rollout-max-response-len is required: the most tokens of a response"
    context, prompt = v.rollout_max_context_len, v.rollout_max_prompt_len
    if context is not None and prompt is not None and prompt >= context:
        yield (
            f"--rollout-max-prompt-len {prompt} leaves no room for a response within --rollout-max-context-len "
            f"{context}; at most {context - 1} is allowed"
        )


@_rule
def _sampling(v: Values) -> Iterator[str]:
    if v.rollout_temperature == 0 and v.learns_from_samples and v.needs_trainer:
        yield (
            "--rollout-temperature 0 cannot be trained on: the trainer divides its logits by it, and all samples of a "
            "group would be equal; use 1.0 (--eval-temperature 0 evaluates greedily)"
        )
    if v.rollout_top_k == 0 or v.eval_top_k == 0:
        yield "--rollout-top-k and --eval-top-k are at least 1, or -1 for all tokens; 0 was given"


# --- checkpoints ---


@_rule
def _checkpoints(v: Values) -> Iterator[str]:
    if v.save_interval is not None and v.save is None:
        yield f"--save-interval {v.save_interval} needs --save, the folder of the checkpoints"
    if v.ckpt_step is not None and v.load is None:
        yield f"--ckpt-step {v.ckpt_step} needs --load, the folder that holds it"
    if v.no_load_optim and v.load is None:
        yield "--no-load-optim has no effect without --load; drop it"
    if v.save_hf is not None and set("{}") & set(v.save_hf.replace("{rollout_id}", "")):
        yield f"--save-hf {v.save_hf}: the only thing in braces may be {{rollout_id}}"
    elif v.save_hf is not None and (problem := export_problem(v.save_hf)):
        yield f"--save-hf {problem}"

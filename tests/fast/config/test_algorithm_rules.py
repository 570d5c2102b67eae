"""Every rule of advantages, losses, corrections, critic and distillation, broken once."""

import json

import pytest

from miles.config.algorithm_rules import ALGORITHM_RULES
from miles.config.resolve import ConfigError, resolve

PPO, TIS, RS = {"advantage_estimator": "ppo"}, {"use_tis": ""}, {"use_rs": ""}
REINFORCE = {"advantage_estimator": "reinforce_plus_plus"}
BASELINE = {"advantage_estimator": "reinforce_plus_plus_baseline"}
DR_GRPO = {"advantage_estimator": "dr_grpo"}
ENGINE, SPARE = {"use_rollout_logprobs": ""}, {"skip_actor_forward_only": ""}
SERVED = {"use_opd": "", "opd_type": "sglang", "opd_teacher_urls": "http://a:1 http://b:1"}
LOADED = {"use_opd": "", "opd_type": "megatron", "opd_teacher_load": "model"}
OWN_LOSS = {"loss_type": "custom_loss", "custom_loss_function_path": "mine.loss"}
SFT = {"loss_type": "sft_loss", "rm_type": None}
CASES = {
    "_without_their_switch": [
        ({"custom_loss_function_path": "a.b"},
         "--custom-loss-function-path a.b has no effect without --loss-type custom_loss; add that, or drop it"),
        ({"gamma": "0.9"}, "--gamma 0.9 has no effect without --advantage-estimator reinforce_plus_plus or ppo"),
        ({**BASELINE, "gamma": "0.9"}, "--gamma 0.9 has no effect without --advantage-estimator reinforce_plus_plus o"),
        ({**REINFORCE, "lambd": "0.9"}, "--lambd 0.9 has no effect without --advantage-estimator ppo"),
        ({"num_critic_only_steps": "1"}, "--num-critic-only-steps 1 has no effect without --advantage-estimator ppo"),
        ({"critic_load": "a"}, "--critic-load a has no effect without --advantage-estimator ppo"),
        ({"critic_save": "a"}, "--critic-save a has no effect without --advantage-estimator ppo"),
        ({"critic_lr": "0.1"}, "--critic-lr 0.1 has no effect without --advantage-estimator ppo"),
        ({"critic_lr_warmup_iters": "1"}, "--critic-lr-warmup-iters 1 has no effect without --advantage-estimator ppo"),
        ({"value_clip": "1"}, "--value-clip 1.0 has no effect without --advantage-estimator ppo"),
        ({"kl_loss_coef": "0.1"}, "--kl-loss-coef 0.1 has no effect without --use-kl-loss; add that, or drop it"),
        ({"use_unbiased_kl": ""}, "--use-unbiased-kl has no effect without --use-kl-loss and a --kl-loss-co"),
        ({"use_kl_loss": "", "use_unbiased_kl": ""}, "--use-unbiased-kl has no effect without --use-kl-loss and a"),
        ({**REINFORCE, "kl_coef": "0.1", "use_unbiased_kl": ""}, "--use-unbiased-kl has no effect without --use-kl-lo"),
        ({"ref_update_interval": "2"}, "--ref-update-interval 2 has no effect without --use-kl-loss or --kl-coef"),
        ({"tis_level": "sequence"}, "--tis-level sequence has no effect without --use-tis or --custom-tis-function-pa"),
        ({"tis_mode": "mask"}, "--tis-mode mask has no effect without --use-tis"),
        ({"tis_clip": "3"}, "--tis-clip 3.0 has no effect without --use-tis"),
        ({"tis_clip_low": "0.5"}, "--tis-clip-low 0.5 has no effect without --use-tis"),
        ({"rs_level": "geometric"}, "--rs-level geometric has no effect without --use-rs"),
        ({"rs_upper_bound": "3"}, "--rs-upper-bound 3.0 has no effect without --use-rs"),
        ({"rs_lower_bound": "0.1"}, "--rs-lower-bound 0.1 has no effect without --use-rs"),
        ({"rs_veto_threshold": "1e-4"}, "--rs-veto-threshold 0.0001 has no effect without --use-rs"),
        ({"opsm_delta": "0.1"}, "--opsm-delta 0.1 has no effect without --use-opsm"),
        ({"opd_type": "sglang"}, "--opd-type sglang has no effect without --use-opd"),
        ({"opd_kl_coef": "2"}, "--opd-kl-coef 2.0 has no effect without --use-opd"),
        ({"opd_teacher_load": "model"}, "--opd-teacher-load model has no effect without --use-opd"),
        ({"opd_teacher_urls": "http://a http://b"}, "--opd-teacher-urls http://a http://b has no effect without --use"),
    ],
    "_reward_statistics": [
        ({**PPO, "disable_rewards_normalization": ""},
         "--disable-rewards-normalization has no effect with --advantage-estimator ppo, which takes rewards as they"),
        ({**REINFORCE, "disable_rewards_normalization": ""}, "with --advantage-estimator reinforce_plus_plus, which t"),
        ({**DR_GRPO, "disable_grpo_std_normalization": ""},
         "--disable-grpo-std-normalization has no effect with --advantage-estimator dr_grpo, which divides by no stan"),
        ({"disable_grpo_std_normalization": "", "disable_rewards_normalization": ""},
         "--disable-grpo-std-normalization has no effect with --disable-rewards-normalization; drop one"),
    ],
    "_groups": [
        ({"n_samples_per_prompt": "1"}, "--n-samples-per-prompt 1 with group-normalised rewards"),
        ({"n_samples_per_prompt": "1", **BASELINE}, "or --advantage-estimator reinforce_plus_plus or ppo"),
    ],
    "_whitening": [
        ({**REINFORCE, "no_normalize_advantages": ""},
         "--no-normalize-advantages with --advantage-estimator reinforce_plus_plus, whose advantages have no baseline"),
    ],
    "_loss": [
        ({"loss_type": "custom_loss"}, "--loss-type custom_loss needs --custom-loss-function-path"),
        ({**OWN_LOSS, "custom_loss_function_path": "a/b.py"},
         "--custom-loss-function-path a/b.py must be the dotted path of a function, such as my_module.loss"),
        ({"advantage_estimator": "cispo", "eps_clip_c": "3"},
         "--eps-clip-c 3.0 has no effect with --advantage-estimator cispo"),
        ({"calculate_per_token_loss": "", "constant_loss_length": "9"}, "there is --constant-loss-length 9 to divide"),
        ({"calculate_per_token_loss": "", **DR_GRPO},
         "--advantage-estimator dr_grpo sets --constant-loss-length 16 to divide by; keep one"),
    ],
    "_kl": [
        ({"use_kl_loss": "", "kl_loss_coef": "0.1", "use_unbiased_kl": "", "kl_loss_type": "k2"},
         "--use-unbiased-kl with --kl-loss-type k2: weighed with the ratio"),
        ({"kl_coef": "0.1"}, "--kl-coef 0.1 is for --advantage-estimator reinforce_plus_plus and reinforce_plus_plus_"),
        ({**PPO, "kl_coef": "0.1"}, "and that is ppo; use --use-kl-loss with --kl-loss-coef"),
        ({**REINFORCE, "kl_coef": "0.1", "use_kl_loss": "", "kl_loss_coef": "0.2"},
         "--kl-coef 0.1 and --kl-loss-coef 0.2 both pull to the reference"),
    ],
    "_shapes_of_others": [
        ({"use_kl_loss": "", "ref_load": "other"}, "--ref-load other has num_hidden_layers 8 and --hf-checkpoint 4"),
        ({**LOADED, "opd_teacher_load": "other"}, "--opd-teacher-load other has num_hidden_layers 8 and --hf-checkpoi"),
    ],
    "_denominator": [
        ({**ENGINE, **TIS}, "--use-tis corrects for what lies between the engine's probabilities and the ratio's deno"),
        ({**ENGINE, **RS}, "--use-rs corrects for what lies between"),
        ({**ENGINE, "custom_tis_function_path": "a.b"}, "--custom-tis-function-path a.b corrects for what lies betwee"),
        ({**ENGINE, "keep_old_actor": ""}, "--use-rollout-logprobs and --keep-old-actor name different denominators"),
        ({**ENGINE, **SPARE}, "--use-rollout-logprobs and --skip-actor-forward-only name different denominators"),
        ({**SPARE, "num_steps_per_rollout": "2"}, "for the first optimizer step of a rollout only, and there are 2"),
        ({**SPARE, "keep_old_actor": ""}, "--keep-old-actor needs the log-probabilities that --skip-actor-forward-onl"),
        ({**SPARE, **REINFORCE, "kl_coef": "0.1"}, "--kl-coef 0.1 needs the log-probabilities that --skip-actor-forwa"),
        ({**SPARE, **SERVED}, "--use-opd needs the log-probabilities that --skip-actor-forward-only spares; drop one"),
        ({**SPARE, "use_opsm": ""}, "--use-opsm needs the log-probabilities that --skip-actor-forward-only spares"),
        ({**SPARE, **PPO}, "--skip-actor-forward-only does not work with --advantage-estimator ppo"),
    ],
    "_bounds": [
        ({**TIS, "custom_tis_function_path": "a.b"}, "--use-tis and --custom-tis-function-path a.b both weigh the los"),
        ({"custom_tis_function_path": "ab"}, "--custom-tis-function-path ab must be the dotted path of a function"),
        ({**TIS, "tis_clip": "0.9"}, "--tis-clip-low 0.0 and --tis-clip 0.9 shut out a ratio of 1"),
        ({**TIS, "tis_clip_low": "1.1"}, "--tis-clip-low 1.1 and --tis-clip 2.0 shut out a ratio of 1"),
        ({**RS, "rs_lower_bound": "3"}, "--rs-lower-bound 3.0 and --rs-upper-bound 2.0 shut out a ratio of 1, at whic"),
    ],
    "_critic": [
        ({**PPO, "num_critic_only_steps": "3"}, "leaves none of --num-rollout 3 to the actor; give at most 2"),
        ({**PPO, "critic_save": "out"}, "--critic-save out has no effect without --save; add that, or drop it"),
        ({**PPO, "save": "out", "critic_save": "out"}, "--critic-save out is the actor's folder too"),
        ({**PPO, "load": "in", "critic_load": "in"}, "--critic-load in is the actor's folder too"),
    ],
    "_critic_schedule": [
        ({**PPO, "lr": "1", "min_lr": "0.5", "lr_decay_style": "linear", "critic_lr": "0.1"},
         "--min-lr 0.5 must not be above --critic-lr 0.1: it bounds the decay of both"),
        ({**PPO, "lr": "1", "lr_warmup_init": "0.5", "critic_lr": "0.1"}, "--lr-warmup-init 0.5 must not be above --c"),
        ({**PPO, "critic_lr_warmup_iters": "4", "lr_decay_iters": "4"},
         "--critic-lr-warmup-iters 4 must be less than --lr-decay-iters 4"),
    ],
    "_distillation": [
        ({"use_opd": ""}, "--use-opd needs --opd-type: sglang for a teacher on a server, megatron for one that the tr"),
        ({**LOADED, "opd_teacher_load": None}, "--opd-type megatron needs --opd-teacher-load"),
        ({**LOADED, "opd_teacher_urls": "http://a"}, "--opd-teacher-urls is for --opd-type sglang, and that is megatr"),
        ({**SERVED, "opd_teacher_urls": None}, "--opd-type sglang needs --opd-teacher-urls, such as http://10.0.0.7:3"),
        ({**SERVED, "opd_teacher_load": "model"}, "--opd-teacher-load model is for --opd-type megatron, and that is s"),
        ({**SERVED, "opd_teacher_urls": "a:1"}, "--opd-teacher-urls a:1 must be the address of a server, such as http"),
        ({**SERVED, "opd_teacher_urls": "http://a http://a"}, "--opd-teacher-urls names http://a more than once"),
    ],
}  # fmt: skip


@pytest.fixture
def folder(folder):
    """Another model lies in `other`, twice as deep."""
    shape = json.loads((folder / "model" / "config.json").read_text())
    (folder / "other").mkdir()
    (folder / "other" / "config.json").write_text(json.dumps(shape | {"num_hidden_layers": 8}))
    return folder


def test_the_table_has_every_rule():
    assert list(CASES) == [rule.__name__ for rule in ALGORITHM_RULES]


@pytest.mark.parametrize(("changes", "expected"), [case for cases in CASES.values() for case in cases])
def test_refused(argv, changes, expected):
    with pytest.raises(ConfigError) as caught:
        resolve(argv(**changes))
    assert sum(expected in problem for problem in caught.value.problems) == 1, caught.value.problems


LOW_CLIP = {"eps_clip": "3e-4", "eps_clip_high": "4e-4"}


@pytest.mark.parametrize(
    "changes",
    [
        {"advantage_estimator": "gspo", **LOW_CLIP},
        {"advantage_estimator": "cispo", "disable_grpo_std_normalization": ""},
        {"advantage_estimator": "rloo", "calculate_per_token_loss": ""},
        DR_GRPO,
        {**DR_GRPO, "constant_loss_length": "100"},
        {**REINFORCE, "gamma": "0.9", "kl_coef": "0.1", "n_samples_per_prompt": "1"},
        {**REINFORCE, "kl_coef": "0.1", "kl_loss_type": "k3", "use_kl_loss": "", "ref_update_interval": "2"},
        BASELINE,
        {**PPO, "lambd": "0.95", "gamma": "0.99", "n_samples_per_prompt": "1", "num_critic_only_steps": "2"},
        {
            **PPO,
            "save": "out",
            "load": "out",
            "critic_lr": "1e-5",
            "critic_lr_warmup_iters": "2",
            "lr_warmup_fraction": "0.1",
        },
        {**PPO, "normalize_advantages": "", "use_kl_loss": "", "kl_loss_coef": "0.1", "kl_loss_type": "k3"},
        {"use_kl_loss": "", "kl_loss_coef": "0.1", "use_unbiased_kl": ""},
        {**ENGINE, "use_opsm": ""},
        {**TIS, "tis_clip_low": "1", "tis_clip": "1"},
        {**PPO, "lr": "1", "lr_decay_style": "linear", "critic_lr": "0.1", "min_lr": "0.1", "lr_warmup_init": "0.1"},
        {**TIS, **RS, "tis_level": "geometric", "tis_mode": "mask", "tis_clip_low": "0.5", "rs_veto_threshold": "1e-4"},
        {"use_opsm": "", "opsm_delta": "0.1", "num_steps_per_rollout": "2"},
        {"custom_tis_function_path": "a.b", "tis_clip": "5", **RS},
        {**SPARE, **TIS},
        {**LOADED, "rm_type": None, "label_key": None, "n_samples_per_prompt": "1"},
        {**SERVED, "opd_kl_coef": "0.5", "eval_prompt_data": "a held_out.jsonl", "eval_interval": "1"},
        {**SERVED, "rm_type": None, "label_key": None},
        OWN_LOSS,
        SFT,
        {**SFT, "calculate_per_token_loss": ""},
        {**PPO, "debug_rollout_only": "", "num_critic_only_steps": "9", "critic_save": "out"},
    ],
)
def test_accepted(argv, changes):
    assert resolve(argv(**changes)).warnings == []


WARNINGS = [
    ({"use_kl_loss": "", "kl_loss_coef": "0.1"}, "--kl-loss-type k1 as a loss has a gradient of zero on average; k3"),
    ({"ref_load": "model"}, "--ref-load model has no effect without --use-kl-loss or --kl-coef"),
    ({"kl_loss_type": "k3"}, "--kl-loss-type k3 has no effect without --use-kl-loss or --kl-coef"),
    ({"use_kl_loss": "", "ref_update_interval": "3"}, "--ref-update-interval 3 is never reached in --num-rollout 3"),
    ({"advantage_estimator": "gspo"}, "--eps-clip 0.2 and --eps-clip-high 0.2 hardly ever clip with --advantage-estim"),
    ({"advantage_estimator": "gspo", "eps_clip": "3e-4", "eps_clip_high": "0.2"}, "--eps-clip-high 0.2 hardly ever cl"),
    ({**SPARE, "eps_clip": "0.1"}, "--eps-clip 0.1 has no effect with --skip-actor-forward-only, which makes every"),
    ({"use_opsm": ""}, "--use-opsm leaves nothing out: a rollout is one optimizer step"),
    ({"keep_old_actor": ""}, "--keep-old-actor costs a copy of the weights and changes nothing: engines and trainer"),
    ({**SERVED, "rollout_temperature": "0.7"}, "student's are at --rollout-temperature 0.7: it is pulled to the teach"),
    ({**OWN_LOSS, **TIS, "use_opsm": "", "advantage_estimator": "cispo", "entropy_coef": "0.1"},
     "the ratio of --advantage-estimator cispo, --entropy-coef 0.1, --use-tis, --use-opsm: left to the function of --"),
    ({**SFT, **PPO, **RS, "eps_clip": "0.1", "no_normalize_advantages": ""},
     "there are no rewards and ratios: --advantage-estimator ppo, --no-normalize-advantages, --eps-clip 0.1, --use-rs "
     "has no effect"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "expected"), WARNINGS)
def test_warned(argv, changes, expected):
    (warning,) = resolve(argv(**changes)).warnings
    assert expected in warning


def test_nothing_of_the_algorithm_is_derived_for_supervised_steps(argv):
    config = resolve(argv(**SFT, **DR_GRPO, use_kl_loss="", save="out")).config
    assert config.constant_loss_length is config.ref_load is config.critic_save is None
    assert not config.needs_reference
    assert not resolve(argv(**SFT, **PPO)).config.use_critic

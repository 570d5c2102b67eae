"""What follows for the algorithm; sentences/algorithm.txt has what is refused."""

from miles.config.resolve import resolve


def test_nothing_of_the_algorithm_is_derived_for_supervised_steps(argv):
    supervised = {"loss_type": "sft_loss", "rm_type": None}
    config = resolve(argv(**supervised, advantage_estimator="dr_grpo", use_kl_loss="", save="out")).config
    assert config.constant_loss_length is config.ref_load is config.critic_save is None
    assert not config.needs_reference
    assert not resolve(argv(**supervised, advantage_estimator="ppo")).config.use_critic

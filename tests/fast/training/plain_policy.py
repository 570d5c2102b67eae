"""The policy loss again, in plain Python and one token at a time: what `compute_policy_loss` is compared with."""

import math

from miles.training.policy import PolicySettings


def bounded(log_ratio: float) -> float:
    return math.exp(max(-20.0, min(20.0, log_ratio)))


class PlainSample:
    """One sample: lists over its response tokens, of which those with mask 0 are dropped at once."""

    def __init__(self, mask, current, old, rollout, ref, entropy, advantages):
        kept = [i for i, m in enumerate(mask) if m]
        columns = (current, old, rollout, ref, entropy, advantages)
        self.current, self.old, self.rollout, self.ref, self.entropy, self.advantages = (
            [column[i] for i in kept] for column in columns
        )
        self.length = len(kept)

    def terms(self, settings: PolicySettings) -> list[dict[str, float]]:
        """Of each trainable token: the contributions to loss and metrics, before any mean."""
        trainer = self.old if settings.old == "trainer" else self.current
        old = self.rollout if settings.old == "engine" else trainer
        log_ratios = [a - b for a, b in zip(self.current, old, strict=True)]
        mismatches = [a - b for a, b in zip(trainer, self.rollout, strict=True)]
        return [self._term(t, settings, log_ratios, mismatches) for t in range(self.length)]

    def _term(self, t, settings, log_ratios, mismatches):
        advantage = self.advantages[t]
        log_ratio = sum(log_ratios) / self.length if settings.form == "sequence_clip" else log_ratios[t]
        ratio = bounded(log_ratio)
        held = min(max(ratio, 1 - settings.eps_clip), 1 + settings.eps_clip_high)
        if settings.form == "clipped_weight":
            loss, clipped = -held * advantage * self.current[t], held != ratio
        else:
            loss, clipped = max(-ratio * advantage, -held * advantage), -held * advantage > -ratio * advantage
            if settings.eps_clip_c is not None and advantage < 0:
                loss = min(loss, -settings.eps_clip_c * advantage)
        result = {"entropy_loss": self.entropy[t], "pg_clipfrac": float(clipped), "ppo_kl": -log_ratios[t]}
        if settings.opsm_delta is not None:
            out = advantage < 0 and sum(-x for x in log_ratios) / self.length > settings.opsm_delta
            loss = 0.0 if out else loss
            result["opsm_clipfrac"] = float(out)
        if settings.tis is not None:
            weight = bounded(self._at(settings.tis.level, mismatches, t))
            inside = settings.tis.low <= weight <= settings.tis.high
            result |= {"tis": weight, "tis_clipfrac": float(not inside), "tis_abs": abs(weight - 1)}
            result["ois"] = bounded(log_ratios[t])
            truncated = min(max(weight, settings.tis.low), settings.tis.high)
            loss *= truncated if settings.tis.mode == "truncate" else weight * inside
        if settings.rejection is not None:
            ratio_there = bounded(self._at(settings.rejection.level, mismatches, t))
            vetoed = settings.rejection.veto is not None and min(map(math.exp, mismatches)) < settings.rejection.veto
            out = vetoed or not settings.rejection.low <= ratio_there <= settings.rejection.high
            loss = 0.0 if out else loss
            result |= {"rs_fraction": float(out), "rs_veto_fraction": float(vetoed)}
        result["pg_loss"] = loss
        result["loss"] = loss - settings.entropy_coef * self.entropy[t]
        if settings.use_kl_loss:
            d = self.ref[t] - self.current[t]
            kl = {"k1": -d, "k2": d * d / 2, "k3": math.exp(d) - 1 - d}[settings.kl_loss_type]
            result["kl_loss"] = kl * (bounded(log_ratios[t]) if settings.use_unbiased_kl else 1)
            result["loss"] += settings.kl_loss_coef * result["kl_loss"]
        result["train_rollout_logprob_abs_diff"] = abs(mismatches[t])
        result["train_rollout_kl"] = math.exp(mismatches[t]) - 1 - mismatches[t]
        for name, exponents in (("ess_ratio", log_ratios), ("rollout_ess_ratio", mismatches)):
            weights = [math.exp(x) for x in exponents]
            result[name] = sum(weights) ** 2 / (self.length * sum(w * w for w in weights))
        return result

    def _at(self, level, log_ratios, t):
        return {"token": log_ratios[t], "sequence": sum(log_ratios), "geometric": sum(log_ratios) / self.length}[level]


def plain_policy_loss(samples: list[PlainSample], settings: PolicySettings, mean: str) -> dict[str, float]:
    """Loss and metrics by name: means over samples of their tokens (`mean` "sample") or over all tokens ("token")."""
    terms = [sample.terms(settings) for sample in samples if sample.length]
    if mean == "token":
        terms = [sum(terms, [])]
    return {
        name: sum(sum(token[name] for token in tokens) / len(tokens) for tokens in terms) / len(terms)
        for name in terms[0][0]
    }

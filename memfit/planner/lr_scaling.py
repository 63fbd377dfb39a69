"""Advice on the learning rate where the global batch is another than the one it was tuned for. Never applied unasked.

Sources: Goyal et al. (2017), "Accurate, large minibatch SGD": multiply the rate by the batch's factor, after a warm-up
of some epochs (5 of ImageNet). Krizhevsky (2014), "One weird trick", and Malladi et al. (2022), "On the SDEs and
scaling rules for adaptive gradient algorithms": with Adam, by the factor's square root. Left out: batches above the
critical one (McCandlish et al., 2018), past which no rule keeps the progress of a sample.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from memfit.errors import InputError

RULES = ("none", "linear", "sqrt")
SOURCES = {
    "none": "the rate as the job sets it",
    "linear": "Goyal et al. 2017 (SGD)",
    "sqrt": "Krizhevsky 2014; Malladi et al. 2022 (Adam)",
}


@dataclass(frozen=True, kw_only=True)
class Rate:
    """The factor of the job's learning rate, why, and what the other rules would give."""

    rule: str
    factor: float
    reason: str
    rules: dict[str, float]
    """Factor by rule."""
    warmup_windows: int
    """Windows over which the rate should rise from the job's own, where the factor is more than one."""


def learning_rate(tuned_for: int | None, global_batch: int, rule: str = "none") -> Rate:
    """The factor that a rule gives.

    Args:
        tuned_for: the global batch that the job's rate was tuned for; None: not known.

    Raises:
        InputError: another rule.
    """
    if rule not in RULES:
        raise InputError(f"--learning-rate {rule}", "no such rule", f"write one of {', '.join(RULES)}")
    if tuned_for is None:
        if rule != "none":
            raise InputError(
                f"--learning-rate {rule}",
                "the global batch that the rate was tuned for is not known",
                "write --tuned-for N too",
            )
        reason = "the job's own; the batch it was tuned for is unknown (--tuned-for N)"
        return Rate(rule="none", factor=1.0, reason=reason, rules={}, warmup_windows=0)
    ratio = global_batch / tuned_for
    rules = {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}
    if ratio == 1:
        reason = "the job's own; it was tuned for this global batch"
    else:
        others = ", ".join(f"{name} x {rules[name]:.3g} ({SOURCES[name]})" for name in ("linear", "sqrt"))
        reason = f"the global batch is {ratio:.3g} x the batch it was tuned for; rules: {others}"
        if rule == "none":
            reason += "; --learning-rate applies one"
    warmup = math.ceil(100 * ratio) if ratio > 1 and rule != "none" else 0
    return Rate(rule=rule, factor=rules[rule], reason=reason, rules=rules, warmup_windows=warmup)

"""The four numbers that tell whether an RL run is well: reward, KL, entropy and clip fraction.

Each has a range; outside of it one line says what that usually means and which key to change. The ranges are rules
of thumb for language models, not laws: a run may be fine outside and sick inside.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megaverl.observe.console import CLIP, ENTROPY, REWARD, short
from megaverl.observe.metrics import first_of


@dataclass(frozen=True)
class Health:
    """One health metric.

    Attributes:
        label: its name in the advice.
        names: metric names; the first that a step has is judged.
        low, high: the range, bounds included.
        advice_low, advice_high: what below and above usually mean, with the key to change.
    """

    label: str
    names: tuple[str, ...]
    low: float
    high: float
    advice_low: str
    advice_high: str

    def advice(self, value: float) -> str:
        """The advice for a value, empty when it is in the range."""
        if self.low <= value <= self.high:
            return ""
        # `not <=` so that nan, which is in no range and on no side of it, is spoken of too
        text = self.advice_low if value < self.low else self.advice_high
        return f"{self.label} {short(value, None)} is outside {self.low:g} to {self.high:g}: {text}"


HEALTH = (
    Health(
        # Holds for scores of 0 to 1 only: see _judged.
        "reward",
        ("critic/score/mean",),
        0.01,
        0.99,
        "hardly any response is rewarded, so there is nothing to learn from; look at the answers, "
        "then raise data.max_response_length or rollout.n, or check reward.function.path",
        "nearly every response is rewarded, so there is nothing left to learn; take harder rows in data.train_files "
        "or end earlier with trainer.total_steps",
    ),
    Health(
        "KL to the reference",
        ("actor/kl_loss", "actor/reward_kl_penalty"),
        -0.1,
        0.5,
        "a negative estimate this large means too few tokens; raise data.train_batch_size",
        "the policy runs away from the reference; raise actor.kl_loss_coef (or algorithm.kl_coef), "
        "or lower actor.optimizer.lr",
    ),
    Health(
        "KL of one update",
        ("actor/ppo_kl",),
        -0.1,
        0.1,
        "the policy changes too much in one step; lower actor.optimizer.lr or actor.epochs",
        "the policy changes too much in one step; lower actor.optimizer.lr or actor.epochs",
    ),
    Health(
        "entropy",
        ENTROPY,
        0.02,
        5.0,
        "samples of one prompt are nearly all alike; raise actor.entropy_coef or actor.clip_ratio_high, "
        "or lower actor.optimizer.lr",
        "the policy is close to noise; lower actor.entropy_coef, actor.optimizer.lr or rollout.temperature",
    ),
    Health(
        "clip fraction",
        CLIP,
        0.0,
        0.3,
        "a share cannot be negative; this is a bug",
        "many tokens are clipped; lower actor.optimizer.lr or actor.epochs, or raise actor.mini_batch_size",
    ),
)


class HealthMonitor:
    """Gives the advice of each metric when it leaves its range, then at most every ``every`` steps."""

    def __init__(self, every: int = 20) -> None:
        self._every = every
        self._said: dict[str, int] = {}

    def check(self, metrics: Mapping[str, float], step: int) -> list[str]:
        """Lines of advice for this step, mostly none; none for a step without a reward (supervised, validation)."""
        lines: list[str] = []
        if first_of(metrics, REWARD) is None:
            return lines
        for health in HEALTH:
            value = _judged(health, metrics)
            text = health.advice(value) if value is not None else ""
            last = self._said.get(health.label)
            if text and (last is None or step - last >= self._every):
                self._said[health.label] = step
                lines.append(text)
        return lines


def _judged(health: Health, metrics: Mapping[str, float]) -> float | None:
    # A custom scorer may score on any scale, where a mean near 0 or above 1 says nothing.
    zero_to_one = metrics.get("critic/score/max", 1.0) <= 1 and metrics.get("critic/score/min", 0.0) >= 0
    if health.label == "reward" and not zero_to_one:
        return None
    return next((metrics[name] for name in health.names if name in metrics), None)

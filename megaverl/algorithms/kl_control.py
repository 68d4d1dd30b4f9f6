"""The weight of the KL in the reward, fixed or steered towards a target."""

from __future__ import annotations

from dataclasses import dataclass

from megaverl.config.schema import AlgorithmConfig

LARGEST_ERROR = 0.2


@dataclass
class KlController:
    """The weight of the KL penalty and, when adaptive, its rule (arXiv 1909.08593, section 2.2).

    After a step of n sequences with the mean KL ``k`` per token,
    ``coef *= 1 + clip(k / target - 1, -0.2, 0.2) n / horizon``. As in verl, the KL is that per token.

    Attributes:
        coef: the weight now; what a checkpoint keeps.
        target: KL per token to hold; None leaves the weight as it is.
        horizon: sequences over which the weight follows.
    """

    coef: float
    target: float | None = None
    horizon: int = 10_000

    @classmethod
    def of(cls, config: AlgorithmConfig) -> KlController:
        """By ``algorithm.kl_coef``, ``kl_controller``, ``kl_target`` and ``kl_horizon``."""
        return cls(config.kl_coef, config.kl_target if config.kl_controller == "adaptive" else None, config.kl_horizon)

    def update(self, kl: float, sequences: int) -> None:
        """Moves the weight after a step.

        Args:
            kl: mean over the sequences of their mean KL per response token (``actor/reward_kl_penalty``).
            sequences: of the step.
        """
        if self.target is not None:
            error = min(max(kl / self.target - 1.0, -LARGEST_ERROR), LARGEST_ERROR)
            self.coef *= max(0.0, 1.0 + error * sequences / self.horizon)

"""Advantages of tokens without a critic: the reward still to come, less a baseline of the response."""

from __future__ import annotations

from torch import Tensor

from megaverl.algorithms.advantages import to_tokens
from megaverl.algorithms.gae import rewards_to_go, token_rewards


def return_advantages(
    scores: Tensor,
    response_mask: Tensor,
    cu_seqlens: Tensor,
    *,
    gamma: float,
    kl: Tensor | None = None,
    kl_coef: float = 0.0,
    baselines: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """REINFORCE++'s and ReMax's advantages before whitening.

    The reward of a token is minus its KL penalty, and of the last response token the score besides. The return of
    token t is ``G_t = sum over j >= 0 of gamma^j r_{t+j}``. REINFORCE++ (arXiv 2501.03262, section 3.1) takes
    ``G_t``, to be whitened over the batch; ReMax (arXiv 2310.10505, section 4) ``G_t - b`` with b the score of the
    greedy response to the same prompt.

    Args:
        scores: [sequences].
        response_mask: bool [tokens].
        cu_seqlens: [sequences + 1].
        gamma: discount of a token.
        kl: [tokens], KL estimates, or None without a penalty.
        kl_coef: weight of the penalty.
        baselines: [sequences], or None for none.

    Returns:
        (advantages, returns), float64 [tokens], 0 outside the mask. A response without a token has neither.
    """
    rewards = token_rewards(scores, response_mask, cu_seqlens, kl=kl, kl_coef=kl_coef)
    returns = rewards_to_go(rewards, response_mask, cu_seqlens, gamma=gamma)
    if baselines is None:
        return returns, returns
    return returns - to_tokens(baselines.double(), cu_seqlens, response_mask), returns

"""The course of the learning rate. Pure."""

from __future__ import annotations

import math

from megaverl.config.schema import OptimizerConfig


def learning_rate(config: OptimizerConfig, update: int, total: int) -> float:
    """Learning rate of optimizer update ``update`` (from 0) of ``total``.

    Warm-up rises linearly, from lr / warmup_steps at the first update to lr at the last one of the warm-up: no update
    is made with a rate of 0. Then, with s going from 0 after the warm-up to 1 after the last update and
    m = min_lr_ratio: constant is lr; linear is lr (1 - (1 - m) s); cosine is lr (m + (1 - m) (1 + cos(pi s)) / 2)
    (arXiv 1608.03983, equation 5, without restarts).
    """
    if update < config.warmup_steps:
        return config.lr * (update + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    course = min(1.0, (update - config.warmup_steps) / max(1, total - config.warmup_steps))
    left = 1 - course if config.schedule == "linear" else (1 + math.cos(math.pi * course)) / 2
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * left)

"""megaverl: reinforcement-learning post-training of large language models on Megatron-Core, vLLM and Ray.

The public API: `load_config`, `Trainer`, `__version__`. Importing this package imports nothing heavy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megaverl.config.load import load_config
    from megaverl.trainer.trainer import Trainer

__version__ = "0.1.0"
__all__ = ["Trainer", "__version__", "load_config"]


def __getattr__(name: str) -> Any:
    # Looked up on first use: the trainer brings torch, Ray and Megatron along, which `megaverl --help` has no use for.
    if name == "load_config":
        from megaverl.config.load import load_config

        return load_config
    if name == "Trainer":
        from megaverl.trainer.trainer import Trainer

        return Trainer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

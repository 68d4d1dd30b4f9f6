"""Forward and backward parity with transformers, for families with real head counts in layouts of up to 8 ranks.

The cases below are chosen so that every size appears beside every other; MEGAVERL_FULL_MATRIX=1 runs them all.
"""

from __future__ import annotations

import itertools
import os

import pytest

from tests.gloo.launch import run_ranks
from tests.gloo.layout_support import MODELS, Case, case, check, compare_cases, references

CASES = [
    # one rank: every family, tied and untied
    *(case(name) for name in MODELS),
    case("qwen2.5-1.5b", tied=False),
    # two ranks
    case("qwen2.5-0.5b", tp=2),
    case("qwen2.5-1.5b", tp=2, sp=True),
    case("qwen3-0.6b", tp=2),
    case("qwen3-8b", tp=2, sp=True),
    case("llama-3.2-1b", tp=2, sp=True),
    case("qwen2.5-7b", pp=2, layers=5),
    case("qwen2.5-0.5b", pp=2),
    case("qwen3-0.6b", pp=2, vpp=2, layers=5),
    case("llama-3.1-8b", pp=2, vpp=2),
    # three
    case("qwen2.5-1.5b", pp=3, layers=4),
    case("qwen3-8b", pp=3),
    # four
    case("qwen2.5-1.5b", tp=4),
    case("qwen2.5-1.5b", tp=4, sp=True, tied=False),
    case("qwen2.5-7b", tp=4, sp=True),
    case("qwen3-0.6b", tp=4, sp=True),
    case("llama-3.1-8b", tp=4),
    case("qwen2.5-0.5b", tp=2, pp=2, sp=True),
    case("qwen2.5-7b", tp=2, pp=2, vpp=2, sp=True),
    case("qwen3-0.6b", pp=2, dp=2),
    # six and eight
    case("qwen2.5-1.5b", tp=2, pp=3, sp=True, layers=5),
    case("llama-3.2-1b", tp=2, pp=3, vpp=2),
    case("qwen2.5-1.5b", tp=4, pp=2, vpp=2, layers=6),
    case("qwen3-8b", tp=4, pp=2, sp=True),
    case("qwen2.5-0.5b", tp=2, pp=2, dp=2),
]


def full_matrix() -> list[Case]:
    """Every model, tied and untied, x TP 1, 2, 4 x PP 1, 2, 3 x chunks 1, 2 x SP that 8 ranks can hold."""
    sizes = itertools.product(MODELS, (True, False), (1, 2, 4), (1, 2, 3), (1, 2), (False, True))
    return [
        case(name, tied=tied, tp=tp, pp=pp, vpp=vpp, sp=sp, layers=6 if vpp == 2 else 0)
        for name, tied, tp, pp, vpp, sp in sizes
        if tp * pp <= 8 and MODELS[name].works_with(tp) and (sp is False or tp > 1) and (vpp == 1 or pp > 1)
    ]


if os.environ.get("MEGAVERL_FULL_MATRIX"):
    CASES = list(dict.fromkeys(CASES + full_matrix()))


@pytest.mark.parametrize("world", sorted({c.layout.world for c in CASES}))
def test_logits_and_all_gradients_equal_transformers(tmp_path, world):
    cases = [c for c in CASES if c.layout.world == world]
    expected = references(cases, tmp_path)
    timeout = 120 + 30 * len(cases)
    check(cases, run_ranks(compare_cases, world, cases, expected, [3], timeout=timeout))

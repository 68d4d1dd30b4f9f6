"""What the parity tests share: tiny models with real head counts, their transformers references, cases in layouts."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from megaverl.config.schema import OptimizerConfig
from megaverl.models.policy import PolicyModel
from megaverl.parallel.compat_megatron import gather_from_sequence_parallel_region
from megaverl.parallel.device import Device
from megaverl.parallel.layout import Layout
from megaverl.parallel.schedule import evaluate_micro_batches
from megaverl.parallel.setup import teardown_model_parallel
from tests.gloo.policy_support import (
    RAGGED,
    VOCAB,
    hf_scores,
    join,
    make_batch,
    make_policy,
    read_weights,
    share_of,
    weighted_loss,
)

TOKENS = 100.0  # a denominator that all ranks share
TEMPERATURE = 0.7
WHOLE_GRADIENTS = OptimizerConfig(lr=0.0, clip_grad=0.0, distributed=False)  # they stay on every rank
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@dataclass(frozen=True)
class Model:
    """A tiny model with the head counts of a real one.

    Attributes:
        name: of the real model.
        family: ``qwen2``, ``qwen3`` or ``llama``.
        head_dim: small; where a family derives it from the hidden size, that is ``heads * head_dim``.
    """

    name: str
    family: str
    heads: int
    kv_heads: int
    head_dim: int
    tied: bool
    layers: int = 2

    def __str__(self) -> str:
        return f"{self.name}-{'tied' if self.tied else 'untied'}-{self.layers}l"

    def works_with(self, tp: int) -> bool:
        return self.heads % tp == 0 and (self.kv_heads % tp == 0 or tp % self.kv_heads == 0)

    def make(self, folder: Path) -> PreTrainedModel:
        """Random weights, biases and norms not at their trivial values; saved in ``folder``."""
        sizes = {
            "vocab_size": VOCAB,
            "intermediate_size": 96,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "max_position_embeddings": 128,
            "tie_word_embeddings": self.tied,
            "initializer_range": 0.08,
        }
        hidden = self.heads * self.head_dim
        torch.manual_seed(0)
        if self.family == "qwen2":
            model = Qwen2ForCausalLM(Qwen2Config(hidden_size=hidden, **sizes))
        elif self.family == "qwen3":  # its head size does not follow from the hidden size
            model = Qwen3ForCausalLM(Qwen3Config(hidden_size=96, head_dim=self.head_dim, **sizes))
        else:
            model = LlamaForCausalLM(LlamaConfig(hidden_size=hidden, rope_parameters=LLAMA3_ROPE, **sizes))
        with torch.no_grad():
            for name, parameter in model.float().named_parameters():
                if name.endswith("bias"):
                    parameter.normal_(0, 0.1)
                elif "norm" in name:
                    parameter.normal_(1, 0.1)
        model.save_pretrained(folder)
        return model


MODELS = {
    model.name: model
    for model in (
        Model("qwen2.5-0.5b", "qwen2", 14, 2, 8, tied=True),
        Model("qwen2.5-1.5b", "qwen2", 12, 2, 8, tied=True),
        Model("qwen2.5-7b", "qwen2", 28, 4, 8, tied=False),
        Model("qwen3-0.6b", "qwen3", 16, 8, 8, tied=True),
        Model("qwen3-8b", "qwen3", 32, 8, 4, tied=False),
        Model("llama-3.2-1b", "llama", 32, 8, 4, tied=True),
        Model("llama-3.1-8b", "llama", 32, 8, 4, tied=False),
    )
}


@dataclass(frozen=True)
class Case:
    """One model in one layout."""

    model: Model
    layout: Layout
    sequence_parallel: bool = False
    recompute: str = "none"

    def __str__(self) -> str:
        extra = ("-sp" if self.sequence_parallel else "") + ("" if self.recompute == "none" else f"-{self.recompute}")
        return f"{self.model}-{self.layout}{extra}"


def case(name: str, *, layers: int = 0, tied: bool | None = None, sp: bool = False, **layout: int) -> Case:
    """A case by the model's name; as many layers as the stages need unless told otherwise."""
    model = MODELS[name]
    stages = layout.get("pp", 1) * layout.get("vpp", 1)
    tied = model.tied if tied is None else tied
    return Case(dataclasses.replace(model, layers=layers or max(2, stages), tied=tied), Layout(**layout), sp)


@dataclass(frozen=True)
class Reference:
    """What transformers makes of a model.

    Attributes:
        weights, gradients: folders of checkpoints.
        logits: [tokens, vocabulary] of the test's batch.
        loss, norm: of the test's loss and its whole gradient.
    """

    weights: str
    gradients: str
    logits: torch.Tensor
    loss: float
    norm: float


def reference(model: Model, folder: Path) -> Reference:
    """Forward and backward of transformers, one process, sequence by sequence."""
    weights, gradients = folder / f"{model}", folder / f"{model}-gradients"
    hf = model.make(weights)
    batch = make_batch(RAGGED)
    with torch.no_grad():
        one_by_one = [hf(input_ids=batch.select([i]).tokens[None]).logits[0] for i in range(len(batch))]
    log_probs, entropy = hf_scores(hf, batch, TEMPERATURE)
    loss, _ = weighted_loss(0.3, TOKENS)(batch, log_probs, entropy)
    loss.backward()
    with torch.no_grad():
        norm = torch.sqrt(sum(p.grad.square().sum() for p in hf.parameters())).item()
        for parameter in hf.parameters():
            parameter.copy_(parameter.grad)
    hf.save_pretrained(gradients)
    return Reference(str(weights), str(gradients), torch.cat(one_by_one), loss.item(), norm)


def references(cases: Iterable[Case], folder: Path) -> dict[Model, Reference]:
    return {model: reference(model, folder) for model in {case.model for case in cases}}


@dataclass(frozen=True)
class Parity:
    """How far one rank is from transformers.

    Attributes:
        logits: largest absolute difference; None on ranks without the output layer.
        gradients: largest difference of each parameter, as a share of its largest reference value.
        norm: relative difference of the gradient's norm.
        loss: relative difference of the loss, all ranks' shares added up.
    """

    logits: float | None
    gradients: dict[str, float]
    norm: float
    loss: float


def compare(case: Case, expected: Reference, cuts: int = 3, device: Device | None = None) -> Parity:
    """Forward and backward of one case on this rank, in process groups that exist; sequences in ``cuts`` pieces."""
    policy = policy_of(case, expected, device=device)
    batch = make_batch(RAGGED)
    found = logits(policy, batch, max_tokens=90)
    difference = None
    if found is not None:
        rows = found.shape[1]
        own = expected.logits[:, policy.grid.at.tp * rows :][:, :rows]
        difference = (found[:, : own.shape[1]].cpu() - own).abs().max().item()

    share = share_of(batch, policy)
    pieces = [list(range(i, len(share), cuts)) for i in range(min(cuts, len(share)))]
    result = policy.update(share, pieces, weighted_loss(0.3, TOKENS), temperature=TEMPERATURE, entropy_grad=True)
    assert result.applied
    loss = result.sums["loss"].detach().clone()
    dist.all_reduce(loss, group=policy.grid.dp)  # on the CPU after a pipeline, else where it was computed
    return Parity(
        difference,
        gradient_differences(policy, expected.gradients),
        abs(result.grad_norm / expected.norm - 1),
        abs(loss.item() / expected.loss - 1),
    )


def policy_of(
    case: Case,
    expected: Reference,
    optimizer: OptimizerConfig | None = WHOLE_GRADIENTS,
    device: Device | None = None,
) -> PolicyModel:
    return make_policy(
        expected.weights,
        case.layout,
        optimizer=optimizer,
        sequence_parallel=case.sequence_parallel,
        recompute=case.recompute,
        device=device,
    )


def gradient_differences(policy: PolicyModel, folder: str) -> dict[str, float]:
    params = policy.parameters_by_name()
    wanted = {name: torch.zeros_like(p) for name, p in params.items()}
    read_weights(policy, folder, wanted)
    return {n: ((p.main_grad - wanted[n]).abs().max() / wanted[n].abs().max()).item() for n, p in params.items()}


def logits(policy: PolicyModel, batch, max_tokens: int) -> torch.Tensor | None:
    """[tokens, padded_vocab / tp] of this rank, pack by pack through the pipeline; None without the output layer."""
    groups, packs = policy._packs(batch, max_tokens)

    def forward(model, pack):
        def finish(hidden):
            if policy.sequence_parallel:
                hidden = gather_from_sequence_parallel_region(hidden)
            return hidden[: pack.batch.tokens.numel(), 0] @ policy.model.output_weight.t()

        return model(pack.tokens, pack.layout), finish

    found = evaluate_micro_batches(policy._runs, packs, forward)
    if not found:
        return None
    starts = batch.cu_seqlens.tolist()
    result = found[0].new_zeros(batch.tokens.numel(), found[0].shape[1])
    for group, part in zip(groups, found, strict=True):
        at = [t for s in group for t in range(starts[s], starts[s + 1])]
        result[at] = part
    return result


def compare_cases(rank: int, world: int, cases: list[Case], expected: dict[Model, Reference], cuts: list[int]):
    """`compare` of all cases, one after the other in the same processes; for `run_ranks`."""
    found = []
    for case in cases:
        join(rank, world, case.layout)
        found.append([compare(case, expected[case.model], n) for n in cuts])
        teardown_model_parallel()
    return found


def check(cases: list[Case], ranks: list[list[list[Parity]]]) -> None:
    """The bar: logits to 1e-5 absolute, gradients, their norm and the loss to 1e-5 relative; all misses at once."""
    wrong = []
    for rank, found in enumerate(ranks):
        for case, runs in zip(cases, found, strict=True):
            for run in runs:
                misses = {name: value for name, value in run.gradients.items() if not value < 1e-5}
                misses |= {n: v for n in ("norm", "loss") if not (v := getattr(run, n)) < 1e-5}
                if run.logits is not None and not run.logits < 1e-5:
                    misses["logits"] = run.logits
                wrong += [f"{case} rank {rank}: {name} is off by {value:.2e}" for name, value in misses.items()]
    assert not wrong, "\n".join(wrong)
    for number, case in enumerate(cases):  # every part of the model was compared by some rank
        names = {name for rank in ranks for name in rank[number][0].gradients}
        assert {f"decoder.layers.{i}.mlp.linear_fc2.weight" for i in range(case.model.layers)} <= names
        assert {"embedding.word_embeddings.weight", "decoder.final_layernorm.weight"} <= names
        assert case.model.tied or "output_layer.weight" in names
        assert any(rank[number][0].logits is not None for rank in ranks)

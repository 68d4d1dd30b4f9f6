"""Generation by transformers, for machines where vLLM does not run. One rank holds the whole model (tp 1).

The fused training tensors (q, k, v and gate, up stacked by rows) hold each HF tensor as a block of whole rows, so
every HF parameter is a view of training storage and nothing is copied at a handoff.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from megaverl.errors import Problem, RunError, UserError
from megaverl.models.family import weight_map
from megaverl.models.shape import ModelShape
from megaverl.resharding.binding import rollout_tensors
from megaverl.resharding.own_weights import OwnWeights, own_weights
from megaverl.resharding.plan import ReshardPlan
from megaverl.rollout.engine import Completion, Sampling
from megaverl.rollout.requests import EngineState, check_request, hf_refusal, request_seed


def hf_views(shape: ModelShape, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """HF name -> view of the rollout parameters (tp 1), the tied head included, the padding of the vocabulary not.

    Args:
        weights: vLLM's name -> rollout parameter (`megaverl.resharding.binding.rollout_tensors`).
    """
    table, views = weight_map(shape), {}
    for row in table.expand():
        for piece in table.pieces(row, 1, 0):
            views[piece.hf] = weights[row.vllm][piece.target]
            if shape.tied and row.split == "vocab":
                views["lm_head.weight"] = views[piece.hf]
    return views


def build_on_views(model_path: str | Path, views: Mapping[str, Tensor]) -> nn.Module:
    """The transformers model of ``model_path``'s config.json whose parameters are ``views``; no weights are allocated.

    Raises:
        RunError: names or shapes do not agree, or a parameter does not lie in the given storage.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(str(model_path), local_files_only=True)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    state = dict(views)
    for name, parameter in dict(model.named_parameters(remove_duplicate=False)).items():
        if name not in state or parameter.shape != state[name].shape:
            raise RunError(f"{name}: transformers wants {tuple(parameter.shape)}, the weight map has no such tensor")
        owner, leaf = model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]
        owner.register_parameter(leaf, nn.Parameter(state.pop(name), requires_grad=False))
    if state:
        raise RunError(f"transformers' model has no parameters named {', '.join(sorted(state))}")
    _materialise_buffers(model, config, next(iter(views.values())).device)
    return model.eval()


def _materialise_buffers(model: nn.Module, config, device: torch.device) -> None:
    """Rotary tables are not weights: their module is built again, off the meta device."""
    for name, module in list(model.named_modules()):
        if any(buffer.is_meta for buffer in module.buffers(recurse=False)):
            with torch.device(device):
                fresh = type(module)(config=config)
            model.set_submodule(name, fresh)


class HfEngine:
    """`RolloutEngine` over a transformers model.

    Batches of ``max_num_seqs`` rows, padded on the left, with a KV cache. Sampling is our own loop: transformers'
    ``generate`` has one generator for the whole batch, so a result would depend on its neighbours. Every sample
    draws from its own generator; log-probs are over the full softmax at the sampling temperature (at 1 when
    greedy), for any top_p and top_k. Matmuls over more or fewer rows may round differently (last bits).

    Args: as `megaverl.rollout.vllm_engine.VllmEngine`; ``plan`` must be for rollout tp 1, ``rank`` is this rank.

    Raises:
        UserError: rollout tp is not 1.
        RunError: the parameters do not fit the model.
    """

    name = "hf"

    def __init__(
        self,
        model_path: str | Path,
        shape: ModelShape,
        plan: ReshardPlan,
        params: Mapping[str, Tensor],
        *,
        max_model_len: int,
        max_num_seqs: int = 256,
        rank: int = 0,
        dtype: torch.dtype | None = None,
        free_cache: Literal["auto", "always", "never"] = "auto",
    ) -> None:
        refusal = hf_refusal(plan.rollout_tp)
        if refusal:
            raise UserError(Problem(refusal, where="rollout.engine", fix="set rollout.engine=vllm, or tp 1 and dp"))
        self.shape = shape
        self.max_model_len = max_model_len
        self.max_num_seqs = max_num_seqs
        self._state = EngineState()
        self.weights = rollout_tensors(plan.ranks[rank], params, dtype)
        self.own_weights = own_weights(self.weights, params)
        self.bytes_released = 0
        self._own = OwnWeights(self.own_weights.values())
        self._free = free_cache != "never"
        self._views = hf_views(shape, self.weights)
        self.model = build_on_views(model_path, self._views)
        self.check_binding()

    def generate(self, prompts: Sequence[Sequence[int]], keys: Sequence[int], sampling: Sampling) -> list[Completion]:
        """See `RolloutEngine.generate`.

        Raises:
            UserError: a prompt or a sampling value is impossible.
            RunError: asleep, or no version committed.
        """
        self._state.check_ready()
        check_request(prompts, keys, sampling, vocab=self.shape.vocab, max_model_len=self.max_model_len)
        rows = [(p, s) for p in range(len(prompts)) for s in range(sampling.n)]
        completions = []
        for start in range(0, len(rows), self.max_num_seqs):
            batch = rows[start : start + self.max_num_seqs]
            seeds = [request_seed(sampling.seed, keys[p], s) for p, s in batch]
            results = self._generate_batch([prompts[p] for p, _ in batch], seeds, sampling)
            completions += [Completion(p, s, *result) for (p, s), result in zip(batch, results, strict=True)]
        return completions

    def sleep(self) -> None:
        """Frees the weights that are not training weights; the KV cache lives no longer than a call of `generate`."""
        self._state.awake = False
        if self._free:
            self._own.free()

    def wake_weights(self) -> None:
        """See `RolloutEngine.wake_weights`."""
        self._own.allocate()

    def wake(self) -> None:
        """Marks the engine awake."""
        self._state.awake = True

    def serve_version(self, version: int) -> None:
        """Commits; there are no cached prefixes to drop."""
        self._state.version = version

    def close(self) -> None:
        """Lets go of the model; the training parameters stay."""
        self._state.awake = False
        del self.model

    @property
    def version(self) -> int:
        """Version of the weights served; -1 before the first commit."""
        return self._state.version

    def check_binding(self) -> None:
        """Raises RunError naming each parameter that is not the view of the training storage it was."""
        wrong = [
            name
            for name, parameter in self.model.named_parameters()
            if parameter.data_ptr() != self._views[name].data_ptr() or parameter.shape != self._views[name].shape
        ]
        if wrong:
            raise RunError(f"these parameters left the training storage: {', '.join(wrong)}")

    @torch.inference_mode()
    def _generate_batch(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], sampling: Sampling
    ) -> list[tuple[list[int], list[float], str]]:
        from transformers import DynamicCache

        draw = Sampler(sampling, seeds)
        ids, mask = _pad_left(prompts, next(self.model.parameters()).device)
        cache = DynamicCache(config=self.model.config)
        done = [False] * len(prompts)
        results: list[tuple[list[int], list[float]]] = [([], []) for _ in prompts]
        stops = () if sampling.ignore_end else frozenset(sampling.stop_ids)
        for _ in range(sampling.max_tokens):
            positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
            output = self.model(
                input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache, logits_to_keep=1
            )
            tokens, log_probs = draw(output.logits[:, -1], done)
            for row, (token, log_prob) in enumerate(zip(tokens.tolist(), log_probs.tolist(), strict=True)):
                if not done[row]:
                    results[row][0].append(token)
                    results[row][1].append(log_prob)
                    done[row] = token in stops
            if all(done):
                break
            ids = tokens[:, None].to(mask.device)
            mask = torch.cat([mask, mask.new_ones(len(prompts), 1)], dim=1)
        return [(*result, "stop" if end else "length") for result, end in zip(results, done, strict=True)]


class Sampler:
    """Draws one token per row, each row from its own generator.

    Args:
        sampling: temperature, top_p and top_k.
        seeds: one per row.
    """

    def __init__(self, sampling: Sampling, seeds: Sequence[int]) -> None:
        self.sampling = sampling
        self._generators = [torch.Generator().manual_seed(seed) for seed in seeds]

    def __call__(self, logits: Tensor, done: Sequence[bool]) -> tuple[Tensor, Tensor]:
        """Tokens [rows] and their log-probs [rows] over the full softmax, from logits [rows, vocabulary].

        Rows that are ``done`` draw nothing; their values mean nothing.
        """
        greedy = self.sampling.temperature == 0
        log_probs = (logits.float() / (1.0 if greedy else self.sampling.temperature)).log_softmax(-1).cpu()
        tokens = log_probs.argmax(-1) if greedy else self._draw(self._cut(log_probs), done)
        return tokens, log_probs.gather(1, tokens[:, None])[:, 0]

    def _draw(self, log_probs: Tensor, done: Sequence[bool]) -> Tensor:
        # Gumbel-max, as an exponential race: argmax p / e with e ~ Exp(1) is distributed as p.
        noise = torch.ones_like(log_probs)
        for row, generator in enumerate(self._generators):
            if not done[row]:
                noise[row].exponential_(generator=generator)
        return (log_probs - noise.log()).argmax(-1)

    def _cut(self, log_probs: Tensor) -> Tensor:
        """Sets what min_p, top_k and then top_p leave out to -inf (vLLM's order); the likeliest token always stays."""
        s = self.sampling
        if s.min_p > 0:
            smallest = log_probs.amax(-1, keepdim=True) + math.log(s.min_p)
            log_probs = log_probs.masked_fill(log_probs < smallest, -torch.inf)
        if 0 < s.top_k < log_probs.shape[-1]:
            smallest = log_probs.topk(s.top_k, dim=-1).values[:, -1:]
            log_probs = log_probs.masked_fill(log_probs < smallest, -torch.inf)
        if s.top_p < 1:
            ordered, order = log_probs.softmax(-1).sort(dim=-1, descending=True)
            beyond = ordered.cumsum(-1) - ordered >= s.top_p  # mass before the token already is enough
            log_probs = log_probs.masked_fill(beyond.scatter(1, order, beyond), -torch.inf)
        return log_probs


def _pad_left(prompts: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Token ids and attention mask [rows, longest prompt]; padding is masked, its id means nothing."""
    longest = max(map(len, prompts))
    ids = [[0] * (longest - len(p)) + list(p) for p in prompts]
    mask = [[0] * (longest - len(p)) + [1] * len(p) for p in prompts]
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)

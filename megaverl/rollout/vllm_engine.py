"""Generation by vLLM in the training process, with the training parameters as its weights.

vLLM joins the world that torch.distributed already has: TP neighbours are adjacent ranks, a world larger than tp holds
several independent replicas. Nothing is loaded from disk but config.json, and no tokenizer is needed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megaverl.config.schema import RolloutConfig
from megaverl.errors import Problem, RunError, UserError
from megaverl.models.shape import ModelShape
from megaverl.parallel.layout import Layout
from megaverl.resharding.binding import BindingReport, bind, check_binding, rollout_tensors
from megaverl.resharding.own_weights import OwnWeights, own_weights
from megaverl.resharding.placement import rollout_order
from megaverl.resharding.plan import ReshardPlan
from megaverl.rollout import compat_vllm, compat_vllm_sampler
from megaverl.rollout.compat_vllm import ALLOCATOR_FIX, allocator_refusal
from megaverl.rollout.engine import Completion, Sampling
from megaverl.rollout.ipc import custom_all_reduce_off
from megaverl.rollout.requests import EngineState, check_request, request_seed

GIB = 1 << 30


class VllmEngine:
    """`RolloutEngine` over vLLM.

    Results do not depend on what else is in the batch as far as seeds go: each sample draws from its own generator.
    What remains is arithmetic: matmuls over more or fewer rows may round differently, which moves log-probs
    in their last bits and can, where two tokens are within that distance, change a token. The same calls
    in the same order give the same tokens and log-probs bit for bit on a CPU.

    Log-probs are over the full softmax at the sampling temperature (at 1 when greedy). On a GPU, sampling with
    top_p < 1, top_k or min_p gives NaN, because vLLM reports the cut distribution there: have the trainer recompute
    them.

    Args:
        model_path: folder with config.json.
        shape: the model's sizes.
        plan: the reshard plan; what it does not alias gets storage of its own, which each handoff fills.
        params: Megatron name -> this rank's training parameter, final in place (after DDP wrapped the model).
        layout: the training layout.
        config: the rollout section of the configuration.
        max_model_len: longest prompt plus response, tokens.
        device: where the parameters are.
        seed: seed of vLLM's own generators (requests carry their own).
        dtype: number format of the rollout; the training parameters' when not given.

    Raises:
        UserError: vLLM is missing or cannot run this model here.
        RunError: torch.distributed is not initialised, vLLM did not keep the training parameters, or a version that is
            not listed failed to start.
    """

    name = "vllm"

    def __init__(
        self,
        model_path: str | Path,
        shape: ModelShape,
        plan: ReshardPlan,
        params: Mapping[str, Tensor],
        layout: Layout,
        config: RolloutConfig,
        max_model_len: int,
        device: torch.device | str = "cpu",
        seed: int = 0,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.device = torch.device(device)
        refusal = compat_vllm.vllm_refusal(shape, self.device.type, plan.rollout_tp)
        if refusal:
            raise UserError(Problem(refusal, "rollout.engine", "set rollout.engine=auto, which takes what can run"))
        refusal = allocator_refusal(config.free_cache) if self.device.type == "cuda" else None
        if refusal:
            raise UserError(Problem(refusal, "environment of the workers", ALLOCATOR_FIX))
        if not dist.is_initialized() or dist.get_world_size() != layout.world:
            raise RunError(f"vLLM joins the workers' world: torch.distributed must span the {layout.world} ranks first")
        self.shape = shape
        self.max_model_len = max_model_len
        self.start_seconds = 0.0
        self._state = EngineState()
        self.dtype = dtype or next(iter(params.values())).dtype
        self.free_cache = config.free_cache
        self.bytes_released = 0
        self._prefixes_cached = True  # whether a request may have left some
        self._plan, self._params = plan.ranks[dist.get_rank()], params
        self._order = rollout_order(plan.train, plan.rollout_tp)
        self._tensors: dict[str, Tensor] = {}
        self._llm = self._start_listed_or_not(str(model_path), plan.rollout_tp, config, seed)
        self.own_weights = own_weights(self._tensors, params)
        self._own = OwnWeights(self.own_weights.values())
        self.binding = self.check_binding()

    def generate(self, prompts: Sequence[Sequence[int]], keys: Sequence[int], sampling: Sampling) -> list[Completion]:
        """See `RolloutEngine.generate`.

        Raises:
            UserError: a prompt or a sampling value is impossible.
            RunError: asleep, or no version committed.
        """
        self._state.check_ready()
        check_request(prompts, keys, sampling, vocab=self.shape.vocab, max_model_len=self.max_model_len)
        if not prompts:
            return []
        exact = compat_vllm_sampler.scale_logprobs(self._llm, self.device.type, sampling.temperature, sampling.cuts)
        # Prefixes cached by an earlier call would change the rounding of this one: a call depends on itself alone.
        self._drop_prefixes()
        self._prefixes_cached = True
        requests = [{"prompt_token_ids": list(p)} for p in prompts for _ in range(sampling.n)]
        params = [self._request(sampling, key, sample) for key in keys for sample in range(sampling.n)]
        outputs = self._llm.generate(requests, params, use_tqdm=False)
        return [_completion(i, sampling.n, output, exact) for i, output in enumerate(outputs)]

    def sleep(self) -> None:
        """Frees the KV cache and the weights that are not training weights, as ``rollout.free_cache`` says.

        On a GPU both lie in vLLM's pool, which unmaps their memory and keeps their addresses: captured graphs stay
        valid. Level 2: nothing is copied to the host but vLLM's buffers (rotary tables), because a handoff writes the
        weights anew. Training weights are outside the pool and stay. On a CPU ``auto`` keeps the KV cache, which costs
        time to fill with zeros again.
        """
        if not self._state.awake:
            return
        self._state.awake = False
        if self.free_cache == "never":
            return
        self._state.weights_there = False
        if self.device.type == "cuda":
            free = torch.cuda.mem_get_info()[0]
            self._llm.sleep(level=2)
            self._prefixes_cached = False  # vLLM's sleep drops them
            self.bytes_released = torch.cuda.mem_get_info()[0] - free
            return
        self._own.free()
        if self.free_cache == "always":
            self._cache.free()

    def wake_weights(self) -> None:
        """See `RolloutEngine.wake_weights`; vLLM's own buffers (rotary tables) come back here too."""
        if not self._state.weights_there:
            if self.device.type == "cuda":
                self._llm.wake_up(["weights"])
            else:
                self._own.allocate()
        self._state.weights_there = True

    def wake(self) -> None:
        """Takes the KV cache's memory and marks the engine awake. Raises RunError before `wake_weights`."""
        if not self._state.weights_there:
            raise RunError("wake() came before wake_weights()")
        if not self._state.awake and self.free_cache != "never":
            if self.device.type == "cuda":
                self._llm.wake_up(["kv_cache"])
                self.bytes_released = 0
            elif self.free_cache == "always":
                self._cache.allocate()
                compat_vllm.claim_cache(self._llm)
        self._state.awake = True

    def serve_version(self, version: int) -> None:
        """Drops cached prefixes and commits; if dropping fails, no version is served."""
        self._state.version = -1
        self._drop_prefixes()
        self._state.version = version

    def _drop_prefixes(self) -> None:
        """vLLM walks over all blocks of the KV cache for this, so not when there is nothing to drop."""
        if self._prefixes_cached and not self._llm.reset_prefix_cache():
            raise RunError("vLLM did not drop its cached prefixes: a request still holds some of its KV cache")
        self._prefixes_cached = False

    def close(self) -> None:
        """Ends vLLM and frees what it holds; the training parameters and the torch.distributed world stay."""
        self._state.awake = False
        compat_vllm.shut_down(self._llm)

    @property
    def version(self) -> int:
        """Version of the weights served; -1 before the first commit."""
        return self._state.version

    @property
    def weights(self) -> dict[str, Tensor]:
        """vLLM's name -> the tensor that it generates with: a training parameter, or storage that a handoff fills."""
        return dict(self._tensors)

    def check_binding(self) -> BindingReport:
        """Checks that vLLM's parameters are the tensors of `weights` now. Raises RunError naming those that are not."""
        model = compat_vllm.engine_model(self._llm)
        report = check_binding(model, self._tensors, compat_vllm.packed_layers(model))
        if report.bytes_added:
            raise RunError(f"vLLM holds {report.bytes_added} bytes of parameters besides those it was given")
        return report

    def _bind(self, model: torch.nn.Module) -> None:
        """What is not a training parameter stays where vLLM has made it: on a GPU that is its own pool."""
        made = dict(model.named_parameters())
        self._tensors = rollout_tensors(self._plan, self._params, self.dtype, made)
        bind(model, self._tensors)

    def _start_listed_or_not(self, model_path: str, tp: int, config: RolloutConfig, seed: int) -> Any:
        warning = compat_vllm.unlisted_version(self.device.type)
        if warning is None:
            return self._start(model_path, tp, config, seed)
        try:
            return self._start(model_path, tp, config, seed)
        except Exception as error:
            what = f"{warning}, and it failed to start: {type(error).__name__}: {error}"
            raise RunError(f"{what}\n    -> install the tested version, or set rollout.engine=hf") from error

    def _start(self, model_path: str, tp: int, config: RolloutConfig, seed: int) -> Any:
        started = time.perf_counter()
        compat_vllm.prepare_environment()
        options = self._device_options(config)
        at = self._order.index(dist.get_rank()) // tp * tp
        if custom_all_reduce_off(self._order[at : at + tp], self.device.type):
            options["disable_custom_all_reduce"] = True
        with compat_vllm.starting(self.device.type, self._order):
            from vllm import LLM

            llm = LLM(
                model=model_path,
                load_format=compat_vllm.register_loader(self._bind),
                skip_tokenizer_init=True,
                generation_config="vllm",
                dtype=str(self.dtype).removeprefix("torch."),
                tensor_parallel_size=tp,
                distributed_executor_backend="external_launcher",
                max_model_len=self.max_model_len,
                max_num_seqs=config.max_num_seqs,
                max_num_batched_tokens=config.max_num_batched_tokens,
                logprobs_mode=compat_vllm_sampler.logprobs_mode(self.device.type),
                seed=seed,
                **options,
            )
        compat_vllm.keep_world(llm)
        if self.device.type == "cpu":
            compat_vllm.claim_cache(llm)
            self._cache = OwnWeights(compat_vllm.cache_tensors(llm))
        compat_vllm_sampler.tune_sampler(llm, self.device.type)
        self.start_seconds = time.perf_counter() - started
        return llm

    def _device_options(self, config: RolloutConfig) -> dict[str, Any]:
        if self.device.type == "cpu":
            return {"enforce_eager": True, "kv_cache_memory_bytes": int(config.cpu_cache_gb * GIB)}
        return {
            "enforce_eager": config.enforce_eager,
            "gpu_memory_utilization": config.gpu_memory_utilization,
            "enable_sleep_mode": self.free_cache != "never",
        }

    def _request(self, sampling: Sampling, key: int, sample: int) -> Any:
        from vllm import SamplingParams

        return SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            max_tokens=sampling.max_tokens,
            seed=request_seed(sampling.seed, key, sample),
            stop_token_ids=[] if sampling.ignore_end else list(sampling.stop_ids),
            ignore_eos=True,  # the end tokens are the caller's; vLLM's own come from a tokenizer it has not got
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
        )


def _completion(position: int, n: int, output: Any, exact: bool) -> Completion:
    prompt, sample = divmod(position, n)
    result = output.outputs[0]
    tokens = list(result.token_ids)
    log_probs = list(result.logprobs.logprobs) if exact else [math.nan] * len(tokens)
    if len(log_probs) != len(tokens) or result.finish_reason not in ("stop", "length"):
        raise RunError(
            f"prompt {prompt}, sample {sample}: vLLM ended it with {result.finish_reason!r}, {len(tokens)} tokens "
            f"and {len(log_probs)} log-probs"
        )
    return Completion(prompt, sample, tokens, log_probs, result.finish_reason)

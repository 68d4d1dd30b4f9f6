"""The phases of a worker that write its models and read them back: train state and Hugging Face exports."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from megaverl.workers.spec import WorkerSpec

if TYPE_CHECKING:
    from megaverl.checkpoint.background import Writing
    from megaverl.models.packed_model import PackedModel
    from megaverl.models.weight_map import WeightMap
    from megaverl.parallel.setup import Grid
    from megaverl.rollout.fresh_vllm import FreshAnswers, FreshJob
    from megaverl.workers.actor_role import ActorRole
    from megaverl.workers.critic_role import CriticRole


class CheckpointPhases:
    """Part of `Worker`, which sets the attributes."""

    spec: WorkerSpec
    rank: int
    grid: Grid
    actor: ActorRole
    critic: CriticRole
    _writing: Writing

    def _from_first_rank(self, value: Any) -> Any:
        raise NotImplementedError

    def save_state(self, run_dir: str, step: int, shared: dict[str, Any], background: bool) -> None:
        """Writes this rank's part of the train state; `saved_files` gives what was written, for the manifest.

        Args:
            background: copy the state to host memory, and write the copy in a thread.
        """
        import torch

        from megaverl.checkpoint.background import Writing
        from megaverl.checkpoint.train_state import save_state

        state = {name: _state_of(model) for name, model in self._trained().items()}
        state["torch_rng"] = torch.get_rng_state()
        own_shared = shared if self.rank == 0 else None
        self._writing = Writing(
            lambda kept: save_state(run_dir, step, self.rank, self.spec.layout.world, kept, own_shared),
            state,
            background=background,
        )

    def save_is_done(self) -> bool:
        """Whether `saved_files` would return (or raise) at once."""
        return self._writing.done

    def saved_files(self) -> Any:
        """What this rank has written of the last `save_state`; waits until it is written, raises what went wrong."""
        return self._writing.result()

    def load_state(self, folder: str) -> None:
        """Takes up this rank's part of a saved train state; weights are copied into the storage that is aliased.

        The state may be of any layout. In the same one each rank reads its own file, and all continues bit for bit.
        """
        import torch

        from megaverl.checkpoint.relayout import SavedRanks
        from megaverl.checkpoint.train_state import load_state

        saved = SavedRanks(folder)
        same = saved.layout == self.spec.layout
        state = load_state(folder, self.rank, saved.layout.world, saved.layout)[0] if same else {}
        for name, model in self._trained().items():
            own = state.get(name) if same else None
            if own is None or not _owns_the_same(model, own["training"]):
                own = saved.share(name, model, self._table(name), self.spec.layout.tp, self.grid.at.tp)
            with torch.no_grad():
                for parameter_name, parameter in model.parameters_by_name().items():
                    parameter.copy_(own["weights"][parameter_name])
            model.weights_written()
            model.load_state_dict(own["training"])
        if same:  # the generators of other layouts' ranks are not those of these ranks, which keep their seeds
            torch.set_rng_state(state["torch_rng"])

    def _table(self, role: str) -> WeightMap:
        from megaverl.models.critic_map import critic_map
        from megaverl.models.family import weight_map

        if role == "critic" and self.spec.critic is not None:
            return critic_map(self.spec.critic.shape)
        if self.spec.config.algorithm.name == "rm":
            return critic_map(self.spec.shape, bias=False)
        return weight_map(self.spec.shape)

    def _trained(self) -> dict[str, PackedModel]:
        """The models that this pool trains."""
        trained: dict[str, PackedModel] = {"actor": self.actor.policy}
        if "critic" in self.spec.roles:
            trained["critic"] = self.critic.critic
        return trained

    def export_hf(self, out: str) -> None:
        """Writes the actor (a trained reward model as a sequence classification) as a Hugging Face checkpoint;
        collective over the first data parallel replica."""
        if self.grid.at.dp:
            return
        from megaverl.checkpoint.hf_export import export_hf
        from megaverl.checkpoint.sequence_classification import export_reward_model
        from megaverl.config.derived import export_shard_bytes
        from megaverl.models.family import weight_map

        config, shape = self.spec.config, self.spec.shape
        params = {n: p.detach() for n, p in self.actor.policy.parameters_by_name().items()}
        options = {
            "source": config.model.path,
            "tokenizer": config.model.tokenizer_path,
            "max_shard_bytes": export_shard_bytes(config),
        }
        if config.algorithm.name == "rm":
            export_reward_model(params, shape, out, self._model_ranks(), **options)
        else:
            export_hf(params, weight_map(shape), out, self._model_ranks(), **options)

    def answer_from_export(self, job: FreshJob) -> FreshAnswers | None:
        """Starts a fresh vLLM on an exported folder and waits for its answers; None beyond the first replica."""
        from megaverl.rollout.fresh_vllm import answer

        if self.spec.device == "cuda":
            import torch

            torch.cuda.empty_cache()  # what this process keeps unused is the other's to take
        return answer(job, self.rank) if self.rank < job.tp else None

    def score_answers(
        self, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]
    ) -> list[list[float]] | None:
        """The actor's log-probabilities of the answers' tokens at temperature 1; each replica scores all of them."""
        from megaverl.data.batch import SequenceBatch

        batch = SequenceBatch.from_lists(prompts, answers)
        found = self.actor.policy.log_probs(
            batch, temperature=1.0, max_tokens=self.actor.max_tokens, with_entropy=False
        )["log_probs"]
        scored = found[batch.response_mask].split(batch.response_lengths.tolist())
        return self._from_first_rank([row.tolist() for row in scored])

    def export_critic_hf(self, out: str) -> None:
        """Writes the critic as a Hugging Face token classification; collective like `export_hf`."""
        if self.grid.at.dp:
            return
        from megaverl.checkpoint.critic import export_critic
        from megaverl.config.derived import export_shard_bytes

        critic, plan = self.critic.critic, self.spec.critic
        if plan is None:
            raise RuntimeError("the pool hosts a critic and its plan does not say which")
        export_critic(
            {n: p.detach() for n, p in critic.parameters_by_name().items()},
            plan.shape,
            out,
            self._model_ranks(),
            source=plan.path,
            tokenizer=self.spec.config.model.tokenizer_path or self.spec.config.model.path,
            max_shard_bytes=export_shard_bytes(self.spec.config),
        )

    def _model_ranks(self) -> Any:
        from megaverl.checkpoint.hf_export import ModelRanks

        at, layout = self.grid.at, self.spec.layout
        return ModelRanks(layout.tp, at.tp, self.grid.tp, layout.pp, at.pp, self.grid.pp)


def _state_of(model: PackedModel) -> dict[str, Any]:
    weights = {name: parameter.detach() for name, parameter in model.parameters_by_name().items()}
    return {"weights": weights, "training": model.state_dict()}


def _owns_the_same(model: PackedModel, training: dict[str, Any]) -> bool:
    """False when the optimizer is divided otherwise over data parallel ranks than it was (``distributed`` changed)."""
    ranges = {name: (part["start"], part["end"]) for name, part in training["slices"].items()}
    return ranges == model.owned_elements()

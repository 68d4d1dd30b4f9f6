"""The phases of a worker that write its models and read them back: train state and Hugging Face exports."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megaverl.workers.spec import WorkerSpec

if TYPE_CHECKING:
    from megaverl.models.packed_model import PackedModel
    from megaverl.parallel.setup import Grid
    from megaverl.workers.actor_role import ActorRole
    from megaverl.workers.critic_role import CriticRole


class CheckpointPhases:
    """Part of `Worker`, which sets the attributes."""

    spec: WorkerSpec
    rank: int
    grid: Grid
    actor: ActorRole
    critic: CriticRole

    def save_state(self, run_dir: str, step: int, shared: dict[str, Any]) -> Any:
        """Writes this rank's part of the train state; returns the files written, for the manifest."""
        import torch

        from megaverl.checkpoint.train_state import save_state

        state = {name: _state_of(model) for name, model in self._trained().items()}
        state["torch_rng"] = torch.get_rng_state()
        return save_state(run_dir, step, self.rank, self.spec.layout.world, state, shared if self.rank == 0 else None)

    def load_state(self, folder: str) -> None:
        """Takes up this rank's part of a saved train state; weights are copied into the storage that is aliased."""
        import torch

        from megaverl.checkpoint.train_state import load_state

        state, _ = load_state(folder, self.rank, self.spec.layout.world, self.spec.layout)
        for name, model in self._trained().items():
            with torch.no_grad():
                for parameter_name, parameter in model.parameters_by_name().items():
                    parameter.copy_(state[name]["weights"][parameter_name])
            model.weights_written()
            model.load_state_dict(state[name]["training"])
        torch.set_rng_state(state["torch_rng"])

    def _trained(self) -> dict[str, PackedModel]:
        """The models that this pool trains."""
        trained: dict[str, PackedModel] = {"actor": self.actor.policy}
        if "critic" in self.spec.roles:
            trained["critic"] = self.critic.critic
        return trained

    def export_hf(self, out: str) -> None:
        """Writes the actor as a Hugging Face checkpoint; collective over the first data parallel replica."""
        if self.grid.at.dp:
            return
        from megaverl.checkpoint.hf_export import ModelRanks, export_hf
        from megaverl.models.family import weight_map

        at, layout = self.grid.at, self.spec.layout
        export_hf(
            {n: p.detach() for n, p in self.actor.policy.parameters_by_name().items()},
            weight_map(self.spec.shape),
            out,
            ModelRanks(layout.tp, at.tp, self.grid.tp, layout.pp, at.pp, self.grid.pp),
            source=self.spec.config.model.path,
            tokenizer=self.spec.config.model.tokenizer_path,
        )

    def export_critic_hf(self, out: str) -> None:
        """Writes the critic as a Hugging Face token classification; collective like `export_hf`."""
        if self.grid.at.dp:
            return
        from megaverl.checkpoint.critic import export_critic

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
        )

    def _model_ranks(self) -> Any:
        from megaverl.checkpoint.hf_export import ModelRanks

        at, layout = self.grid.at, self.spec.layout
        return ModelRanks(layout.tp, at.tp, self.grid.tp, layout.pp, at.pp, self.grid.pp)


def _state_of(model: PackedModel) -> dict[str, Any]:
    weights = {name: parameter.detach() for name, parameter in model.parameters_by_name().items()}
    return {"weights": weights, "training": model.state_dict()}

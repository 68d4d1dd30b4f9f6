"""verl's command lines: what each word becomes, what has no effect, what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from megaverl.cli import main
from megaverl.config.fields import all_fields
from megaverl.config.load import load_config
from megaverl.config.rules import check_rules
from megaverl.config.verl_keys import DEFAULTS, ROWS
from megaverl.config.verl_keys_convert import ESTIMATORS, LOSS_MODES
from megaverl.config.verl_keys_doc import page
from megaverl.config.verl_keys_translate import is_verl, translate
from megaverl.errors import Problems
from tests.unit.config.verl_scripts import SCRIPTS, words

DOCS = Path(__file__).parents[3] / "docs"
A, R = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


V, D = f"{R}.val_kwargs", f"{A}.use_dynamic_bsz=True"
C = "custom_reward_function"


def became(*given: str, whole: bool = False) -> list[str]:
    problems = Problems()
    done = translate(given, problems, whole=whole)
    problems.raise_if_any()
    return done.words


def refused(*given: str) -> str:
    problems = Problems()
    translate(given, problems, whole=True)
    (problem,) = problems.found
    return str(problem)


def test_the_page_is_the_one_that_the_table_makes():
    assert (DOCS / "from-verl.md").read_text() == page(), (
        "run: python -m megaverl.config.verl_keys_doc > docs/from-verl.md"
    )


def test_every_row_leads_to_a_key_that_there_is():
    keys = [key.strip() for row in ROWS for key in row.to.split(",") if key.strip()]
    assert {key.partition("=")[0] for key in keys} <= all_fields().keys()
    assert DEFAULTS.keys() <= all_fields().keys()
    names = [row.key for row in ROWS]
    assert len(names) == len(set(names)), sorted(name for name in names if names.count(name) > 1)
    assert all(row.text for row in ROWS if row.kind in ("nothing", "only")), "no reason is given"
    assert not {row.key for row in ROWS if row.kind != "same"} & all_fields().keys(), (
        "a key of ours with another meaning"
    )


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_example_scripts_give_a_configuration_that_can_run(name):
    config = load_config(None, became(*words(name), whole=True))
    problems = Problems()
    check_rules(config, problems)
    problems.raise_if_any()


def test_the_megatron_grpo_script_means_here_what_it_means_there():
    config = load_config(None, became(*words("grpo_megatron"), whole=True))
    assert (config.algorithm.name, config.rollout.n, config.data.truncation) == ("grpo", 5, "filter")
    assert config.data.train_files == ["/d/gsm8k/train.parquet", "/d/math/train.parquet"]
    assert (config.actor.layout.tp, config.actor.layout.pp, config.rollout.tp) == (2, 2, 2)
    assert (config.actor.use_kl_loss, config.actor.kl_loss_coef, config.algorithm.kl_in_reward) == (True, 0.001, False)
    assert config.actor.max_tokens_per_micro_batch == config.reference.max_tokens_per_micro_batch == 4 * 2048
    assert (config.trainer.val_every, config.trainer.save_every, config.trainer.total_epochs) == (5, 20, 15)
    assert config.trainer.run_dir == "checkpoints/verl_grpo_example/qwen2_7b_megatron"
    assert config.actor.recompute == "full"


def test_a_whole_command_line_has_verls_defaults_and_a_file_of_ours_keeps_ours():
    assert "algorithm.name=ppo" in became(f"{R}.n=2", whole=True)
    assert became(f"{R}.n=2") == ["rollout.n=2"]
    assert "algorithm.name=ppo" not in became("algorithm.adv_estimator=grpo", whole=True)


@pytest.mark.parametrize(
    ("given", "ours"),
    [
        ([f"{A}.clip_ratio=0.1"], ["actor.clip_ratio_low=0.1", "actor.clip_ratio_high=0.1"]),
        ([f"{A}.clip_ratio=0.1", f"{A}.clip_ratio_high=0.3"],
         ["actor.clip_ratio_low=0.1", "actor.clip_ratio_high=0.3"]),
        ([D, f"{A}.ppo_max_token_len_per_gpu=9000"], ["actor.max_tokens_per_micro_batch=9000"]),
        ([f"{A}.ppo_max_token_len_per_gpu=9000"], []),
        ([f"{A}.megatron.sequence_parallel=True"], []),
        (
            [f"{A}.megatron.sequence_parallel=True", f"{A}.megatron.tensor_model_parallel_size=2"],
            ["actor.layout.sequence_parallel=true", "actor.layout.tp=2"],
        ),
        ([f"{A}.megatron.virtual_pipeline_model_parallel_size=null"], ["actor.layout.vpp=1"]),
        ([f"{A}.optim.betas=[0.9,0.95]"], ["actor.optimizer.beta1=0.9", "actor.optimizer.beta2=0.95"]),
        (
            [f"{A}.optim.lr_warmup_steps_ratio=0.1", "trainer.total_training_steps=50", f"{A}.ppo_epochs=2"],
            ["actor.optimizer.warmup_steps=40", "trainer.total_steps=50", "actor.epochs=2"],
        ),
        ([f"{R}.val_kwargs.temperature=0.7"], ["rollout.val.temperature=0"]),
        ([f"{R}.val_kwargs.temperature=0.7", f"{R}.val_kwargs.do_sample=True"], ["rollout.val.temperature=0.7"]),
        ([f"{R}.top_k=0"], ["rollout.top_k=-1"]),
        (["trainer.resume_mode=disable"], ["trainer.resume=never"]),
        (["trainer.resume_mode=resume_path", "trainer.resume_from_path=/c/step_3"], ["trainer.resume=/c/step_3"]),
        (["trainer.resume_from_path=/c/step_3"], []),
        (["trainer.max_actor_ckpt_to_keep=3", "trainer.max_critic_ckpt_to_keep=3"], ["trainer.keep_last=3"]),
        ([f"{C}.path=r.py", f"{C}.name=f"], ["reward.function.path=r.py", "reward.function.name=f"]),
        (["algorithm.kl_penalty=kl", "algorithm.kl_ctrl.kl_coef=0.01"],
         ["algorithm.kl_estimator=k1", "algorithm.kl_coef=0.01"]),
        (["algorithm.kl_ctrl.type=adaptive", "algorithm.kl_ctrl.target_kl=0.2", "algorithm.kl_ctrl.horizon=5000"],
         ["algorithm.kl_controller=adaptive", "algorithm.kl_target=0.2", "algorithm.kl_horizon=5000"]),
        (["algorithm.filter_groups.enable=True", "algorithm.filter_groups.max_num_gen_batches=5",
          "algorithm.filter_groups.metric=acc"],
         ["algorithm.dynamic_sampling=True", "algorithm.max_generation_batches=5"]),
        (["reward_model.overlong_buffer.enable=True", "reward_model.overlong_buffer.len=9",
          "reward_model.overlong_buffer.penalty_factor=0.5"],
         ["reward.overlong_buffer=9", "reward.overlong_penalty=0.5"]),
        (["algorithm.rollout_correction.rollout_is=token", "algorithm.rollout_correction.rollout_is_threshold=3.0",
          "algorithm.rollout_correction.rollout_rs=null", "algorithm.rollout_correction.rollout_rs_threshold=null"],
         ["actor.rollout_correction.importance=token", "actor.rollout_correction.threshold=3.0",
          "actor.rollout_correction.mask=none"]),
        ([f"{A}.tis_imp_ratio_cap=2.0"],
         ["actor.rollout_correction.importance=token", "actor.rollout_correction.threshold=2.0"]),
        (["trainer.log_val_generations=10"], ["trainer.val_generations=10"]),
        (["data.filter_overlong_prompts=True", "data.truncation=error"], ["data.truncation=filter"]),
        (["++trainer.nnodes=2", "+rollout.n=3"], ["cluster.nodes=2", "rollout.n=3"]),
        (["trainer.experiment_name=001"], ["trainer.experiment=001"]),
        (["critic.model.path=${actor_rollout_ref.model.path}"], ["critic.path=${model.path}"]),
        (["reward_model.enable=True", "reward_model.model.path=/m/rm", "reward_model.micro_batch_size_per_gpu=2"],
         ["reward.model.path=/m/rm", "reward.model.max_tokens_per_micro_batch=2048"]),
        (["reward_model.enable=False", "reward_model.model.path=/m/rm"], []),
        (["custom_reward_function.reward_kwargs.scale=2.0"], ['reward.function.arguments=["scale=2.0"]']),
        (["reward_model.reward_manager=batch"], ["reward.function.batch=true"]),
        (["~trainer.resume_from_path", "hydra.run.dir=x", "ray_kwargs.ray_init.num_cpus=8"], []),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)  # fmt: skip
def test_translations(given, ours):
    assert became(*given) == ours


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["actor_rollout_ref.actor.optim.lrr=1"], "did you mean actor_rollout_ref.actor.optim.lr"),
        ([f"{A}.megatron.tensor_model_parallel_sizes=8"], f"did you mean {A}.megatron.tensor_model_parallel_size"),
        (["actor_rollout_ref.rollouts.n=1"], "unknown key"),
        (["actor_rollout_ref.rollout.nn=1"], "did you mean actor_rollout_ref.rollout.n"),
        (["trainer.nnode=1"], "did you mean trainer.nnodes"),
        (["+trainer.foo=1"], "unknown key trainer.foo"),
        (["~trainer.foo"], "unknown key trainer.foo"),
        (["reward_model.enable=True"], "name the reward model"),
        (["reward_model.model.input_tokenizer=/m/other"], "the reward model reads the actor's tokens"),
        (["reward_model.reward_manager=mine"], "known are naive"),
        (["reward_model.model.pathh=/m/rm"], "did you mean reward_model.model.path"),
        ([f"{R}.name=sglang"], "vllm and hf generate"),
        ([f"{R}.multi_turn.enable=True"], "a response is one turn"),
        (["actor_rollout_ref.model.lora_rank=16"], "there is no LoRA"),
        (["actor_rollout_ref.model.override_config.x=1"], "change the checkpoint's config.json"),
        (["algorithm.adv_estimator=gpg"], "known are gae, grpo"),
        (["algorithm.filter_groups.max_num_gen_batches=0"], "algorithm.max_generation_batches=10"),
        (["reward_model.overlong_buffer.enable=True"], "give reward_model.overlong_buffer.len=TOKENS"),
        (["algorithm.rollout_correction.bypass_mode=True"], "old log-probabilities are the training model's"),
        ([f"{A}.optim.lr_warmup_steps_ratio=0.1"], "give actor.optimizer.warmup_steps"),
        (["trainer.resume_mode=resume_path"], "name the checkpoint"),
        (["trainer.save_freq=often"], "docs/from-verl.md says what trainer.save_freq takes"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_refusals(given, message):
    assert message in refused(*given)


@pytest.mark.parametrize(("verl", "ours"), ESTIMATORS.items())
def test_an_algorithm_is_taken_when_there_is_one_and_refused_otherwise(verl, ours):
    if ours in all_fields()["algorithm.name"].choices:
        assert became(f"algorithm.adv_estimator={verl}") == [f"algorithm.name={ours}"]
    else:
        assert f"there is no algorithm {ours}" in refused(f"algorithm.adv_estimator={verl}")


@pytest.mark.parametrize("mode", LOSS_MODES)
def test_losses_that_are_algorithms_here(mode):
    given = [f"{A}.policy_loss.loss_mode={mode}", "algorithm.adv_estimator=grpo"]
    if mode in all_fields()["algorithm.name"].choices:
        assert became(*given) == [f"algorithm.name={mode}"]
    else:
        assert f"there is no algorithm {mode}" in refused(*given)


def test_every_word_is_accounted_for():
    for name in SCRIPTS:
        problems = Problems()
        done = translate(words(name), problems, whole=True)
        spoken_of = [word for word, _ in (*done.became, *done.without_effect)]
        untouched = [word for word in words(name) if word not in spoken_of]
        assert not problems.found
        assert all(not is_verl(word) or word.startswith("+") for word in untouched)
        assert all(word.lstrip("+").partition("=")[0] in all_fields() for word in untouched)


def test_the_command_takes_verls_line_as_it_is(capsys, tmp_path):
    assert main(["train", *SCRIPTS["grpo_megatron"].split(), "--dry-run"]) == 0
    out, err = capsys.readouterr()
    assert f"verl: {R}.n=5 -> rollout.n=5\n" in err
    assert "verl: data.return_raw_chat= has no effect: prompts are kept as token ids\n" in err
    (tmp_path / "config.yaml").write_text(out)
    assert load_config(tmp_path / "config.yaml") == load_config(None, became(*words("grpo_megatron"), whole=True))


def test_verls_words_change_a_file_of_ours_and_its_own_unknown_keys_are_still_refused(capsys):
    recipe = str(DOCS.parent / "configs" / "yaml" / "grpo_tiny.yaml")
    assert main(["train", recipe, "--dry-run", "model.path=m", f"{R}.n=3", "rollout.temperature=0.7"]) == 0
    out, err = capsys.readouterr()
    assert "  'n': 3\n" in out
    assert "verl's defaults" not in err
    assert main(["train", recipe, "--dry-run", f"{R}.n=3", "rolout.n=3"]) == 2
    assert "did you mean rollout.n" in capsys.readouterr().err

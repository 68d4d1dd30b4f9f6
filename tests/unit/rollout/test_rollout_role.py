"""The rollout in a worker, around an engine that answers given texts."""

import pytest

from megaverl.data.tiny import build_tiny_checkpoint
from megaverl.data.tokenizer import load_tokenizer
from megaverl.rollout.engine import Completion, Sampling
from megaverl.workers.rollout_role import PromptTask, RolloutRole

ANSWERS = ["3+4=7\n#### 7 and more", "no idea at all"]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_tokenizer(build_tiny_checkpoint(tmp_path_factory.mktemp("tiny") / "model", 0))


class Engine:
    """Answers every prompt with `ANSWERS`, one each."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer

    def generate(self, prompts, keys, sampling):
        ids = [self.tokenizer.encode_plain(ANSWERS[p % 2]) for p in range(len(prompts))]
        return [Completion(p, 0, i, [-float(n) for n in range(len(i))], "length") for p, i in enumerate(ids)]


def test_stop_texts_end_responses_and_their_columns(tokenizer):
    role = RolloutRole(Engine(tokenizer), tokenizer, scorer=None, tp_rank=0, tp=1)
    tasks = [PromptTask(key, [1, 2, 3], "megaverl/arithmetic", "7", {}, key) for key in (0, 1)]
    sampling = Sampling(n=1, temperature=1.0, top_p=1.0, top_k=-1, max_tokens=64, seed=0, stop=("####", "=="))
    role.generate(tasks, sampling)
    shard, batch = role.describe("reference"), role.batch()
    cut = len(tokenizer.encode_plain("3+4=7\n####"))
    whole = len(tokenizer.encode_plain(ANSWERS[1]))
    assert shard.response_lengths == [cut, whole]
    assert shard.clipped == [False, True]
    assert tokenizer.decode(batch.select([0]).tokens[3:].tolist()) == "3+4=7\n####"
    assert batch.columns["rollout_log_probs"].tolist() == [
        0.0, 0.0, 0.0, *(-float(n) for n in range(cut)), 0.0, 0.0, 0.0, *(-float(n) for n in range(whole)),
    ]  # fmt: skip

from megaverl.data.encode import CHUNK, encode_prompts
from megaverl.data.tiny import build_tiny_checkpoint
from megaverl.data.tokenizer import load_tokenizer


def test_more_processes_give_the_same_ids_in_the_same_order(tmp_path):
    tokenizer = load_tokenizer(build_tiny_checkpoint(tmp_path / "model", layers=1))
    prompts = [[{"role": "user", "content": f"number {n}"}] if n % 3 else f"plain {n}" for n in range(CHUNK + 76)]
    assert encode_prompts(tokenizer, prompts, workers=2) == encode_prompts(tokenizer, prompts, workers=1)

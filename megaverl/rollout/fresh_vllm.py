"""A vLLM of its own, in fresh processes, that loads an exported folder and answers prompts greedily.

It shares nothing with the run: weights, configuration and tokenizer come from the folder's files. Each rank of a
rollout replica starts one process (`answer`), which runs this module and joins the others' processes in a world.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megaverl.files import write_bytes

FREE_SHARE = 0.9
"""Share of a GPU's free memory that the fresh vLLM may use: the run keeps what it has."""
CPU_CACHE_BYTES = 256 << 20


@dataclass(frozen=True)
class FreshJob:
    """What the fresh processes are told.

    Attributes:
        folder: the Hugging Face checkpoint.
        prompts: token ids.
        max_tokens: tokens to generate for each prompt, end tokens or not.
        device, dtype: ``cpu`` or ``cuda``; the number format as torch names it (``float32``).
        tp: processes, and vLLM's tensor parallel size.
        address, port: where they meet.
        timeout: seconds for all of it.
    """

    folder: str
    prompts: list[list[int]]
    max_tokens: int
    device: str
    dtype: str
    tp: int
    address: str
    port: int
    timeout: float


@dataclass(frozen=True)
class FreshAnswers:
    """What came of it.

    Attributes:
        failure: why there are no answers; empty when there are.
        tokens, log_probs: of each response [prompts][max_tokens], over the full softmax at temperature 1.
        texts: the responses as vLLM's own tokenizer decodes them, special tokens included.
    """

    failure: str = ""
    tokens: list[list[int]] | None = None
    log_probs: list[list[float]] | None = None
    texts: list[str] | None = None


def answer(job: FreshJob, rank: int) -> FreshAnswers:
    """Runs rank ``rank`` of ``job`` in a process of its own and waits for it. Its output goes where this one's goes."""
    package_root = str(Path(__file__).resolve().parents[2])
    search = os.pathsep.join([package_root, *(entry for entry in sys.path if entry)])
    with tempfile.TemporaryDirectory(prefix="megaverl-fresh-") as folder:
        files = Path(folder) / "job", Path(folder) / "answers"
        write_bytes(files[0], pickle.dumps(job))
        command = [sys.executable, "-m", "megaverl.rollout.fresh_vllm", str(rank), *map(str, files)]
        try:
            code = subprocess.run(command, env={**os.environ, "PYTHONPATH": search}, timeout=job.timeout).returncode
        except subprocess.TimeoutExpired:
            return FreshAnswers(f"a fresh vLLM had not answered after {job.timeout:g} s")
        if not files[1].exists():
            return FreshAnswers(f"the process of a fresh vLLM ended with exit code {code}")
        return pickle.loads(files[1].read_bytes())


def _generate(job: FreshJob, rank: int) -> FreshAnswers:
    """In the fresh process: join the others, load the folder with plain vLLM, answer."""
    import torch

    from megaverl.parallel.device import choose_device
    from megaverl.parallel.setup import init_distributed
    from megaverl.rollout import compat_vllm

    device = choose_device("fp32", "eager", job.device)  # to join the world; vLLM has its own format
    init_distributed(rank, job.tp, job.address, job.port, device)
    compat_vllm.prepare_environment()
    with compat_vllm.starting(device.kind):
        from vllm import LLM, SamplingParams

        llm = LLM(
            model=job.folder,
            trust_remote_code=False,
            generation_config="vllm",
            dtype=job.dtype,
            tensor_parallel_size=job.tp,
            distributed_executor_backend="external_launcher",
            max_model_len=max(map(len, job.prompts)) + job.max_tokens,
            max_num_seqs=max(2, len(job.prompts)),
            enforce_eager=True,
            seed=0,
            **_memory(torch, device.kind),
        )
    compat_vllm.keep_world(llm)
    how = SamplingParams(
        temperature=0.0,
        max_tokens=job.max_tokens,
        ignore_eos=True,
        logprobs=0,
        flat_logprobs=True,
        skip_special_tokens=False,
    )
    outputs = [o.outputs[0] for o in llm.generate([{"prompt_token_ids": p} for p in job.prompts], how, use_tqdm=False)]
    compat_vllm.shut_down(llm)
    return FreshAnswers(
        tokens=[list(o.token_ids) for o in outputs],
        log_probs=[list(o.logprobs.logprobs) for o in outputs],
        texts=[o.text for o in outputs],
    )


def _memory(torch: Any, kind: str) -> dict[str, Any]:
    """vLLM's options of how much memory to take, beside a run that keeps its own."""
    if kind == "cpu":
        return {"kv_cache_memory_bytes": CPU_CACHE_BYTES}
    free, total = torch.cuda.mem_get_info()
    return {"gpu_memory_utilization": FREE_SHARE * free / total}


def main(rank: int, job_file: Path, answers_file: Path) -> None:
    """Writes the answers, or the failure, of one rank."""
    try:
        found = _generate(pickle.loads(job_file.read_bytes()), rank)
    except Exception as error:  # whatever vLLM raises: it is the finding
        import traceback

        traceback.print_exc()
        found = FreshAnswers(f"a fresh vLLM cannot load it or generate with it: {type(error).__name__}: {error}")
    write_bytes(answers_file, pickle.dumps(found))
    sys.stdout.flush()
    os._exit(0)  # an interpreter with a world in it may hang when it ends


if __name__ == "__main__":
    from megaverl.rollout import fresh_vllm  # by its name, under which the other process reads what this one pickles

    fresh_vllm.main(int(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]))

"""vLLM's side of speed_table.py, run by a Python that has it: rollouts of the same prompts, lengths and weights.

The engine runs in a process of its own, as vLLM has it. Prompts are read once for all their responses (prefix caching),
and nothing is decoded to text, which training does not need. Sequences run beside each other as far as vLLM's memory
for keys and values holds them, at most MOST. Products are bf16; float32 on a CPU, many of which lack instructions that
vLLM's kernels for bf16 take. A last round asks for no log-probs, to show what they cost vLLM; training needs them.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
import transformers
from step_work import Work

from paddock.engines.rollout.vllm import ON_CPU

MOST = 1024
SHARE = 0.85  # of a device's memory; the process that waits for this one keeps a little of it


def read(work: Work) -> list[list[int]]:
    """Returns the tokens of all prompts."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(work.model)
    conversations = [json.loads(line)["prompt"] for line in Path(work.data).read_text().splitlines()]
    return [
        tokenizer.apply_chat_template(conversation, add_generation_prompt=True, return_dict=True)["input_ids"]
        for conversation in conversations
    ]


def main() -> None:
    work, limits = Work.read(sys.argv[1]), json.loads(sys.argv[2])
    on_cpu = work.device == "cpu"
    for name, value in ({"VLLM_NO_USAGE_STATS": "1"} | (ON_CPU if on_cpu else {})).items():
        os.environ.setdefault(name, value)
    import vllm  # reads these when it is imported

    settings = {"dtype": "float32" if on_cpu else "bfloat16", "max_num_seqs": min(MOST, work.rows)}
    engine = vllm.LLM(
        work.model, skip_tokenizer_init=True, enable_prefix_caching=True, seed=0, gpu_memory_utilization=SHARE,
        max_model_len=work.prompt_tokens + max(limits), enforce_eager=on_cpu, **settings,
    )  # fmt: skip
    prompts = read(work)

    def seconds(step: int, log_probs: int | None) -> float:
        now = [{"prompt_token_ids": tokens} for tokens in prompts[step * work.prompts : (step + 1) * work.prompts]]
        asked = [
            vllm.SamplingParams(
                n=work.n, max_tokens=limit, temperature=1.0, logprobs=log_probs, ignore_eos=True, detokenize=False
            )
            for limit in limits
        ]  # fmt: skip
        start = time.perf_counter()
        answers = engine.generate(now, asked, use_tqdm=False)
        taken = time.perf_counter() - start
        lengths = [[len(output.token_ids) for output in answer.outputs] for answer in answers]
        if lengths != [[limit] * work.n for limit in limits]:
            raise RuntimeError(f"responses have {lengths} tokens, not {limits}")
        return taken

    taken = [seconds(step, log_probs=0) for step in range(work.warmup + work.steps)][work.warmup :]
    engine.reset_prefix_cache()  # the last round reads prompts that others have read
    found = {"seconds": taken, "seconds_without_log_probs": seconds(work.warmup, log_probs=None)}
    versions = {"vllm": vllm.__version__, "torch": torch.__version__, "transformers": transformers.__version__}
    print(json.dumps({**found, "settings": settings, "versions": versions}), flush=True)


if __name__ == "__main__":
    main()

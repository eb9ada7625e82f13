"""GRPO on GSM8K with a Python interpreter: the model writes programs, and the sandbox of this machine runs them.

    python python_interpreter.py --check                    # the built-in model, two steps: seconds on a CPU
    paddock data gsm8k --local_save_dir ~/data/gsm8k        # then, on a GPU:
    python python_interpreter.py --model Qwen/Qwen2.5-1.5B-Instruct --data ~/data/gsm8k

A program has no network, sees none of your files, and does not know the row's answer. The sandbox needs what scorers of
code need: see examples/sandbox/README.md. The built-in model writes no programs, so `--check` tries the rest alone.
"""

import argparse
from pathlib import Path

import paddock

ROLLOUT = "actor_rollout_ref.rollout.multi_turn"
KEYS = {
    f"{ROLLOUT}.max_assistant_turns": 4,  # the last turn should be the answer
    f"{ROLLOUT}.max_parallel_calls": 2,
    f"{ROLLOUT}.max_tool_response_length": 500,
    f"{ROLLOUT}.tool_timeout": 30,
    "reward_model.sandbox.timeout": 5,  # seconds of one program
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="Qwen/Qwen2.5-1.5B-Instruct")
    parser.add_argument("--data", type=Path, default=Path("~/data/gsm8k"))
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    if options.check:
        rows = [{"prompt": [{"role": "user", "content": f"{a}*{a}="}], "answer": str(a * a)} for a in range(10, 18)]
        run = paddock.Run("builtin:tiny", rows, "exact_match", tools="code_interpreter", batch=4, n=2, steps=2,
                          prompt_length=32, response_length=32, config=KEYS)  # fmt: skip
    else:
        data = options.data.expanduser()
        run = paddock.Run(options.model, str(data / "train.parquet"), validation=str(data / "test.parquet"),
                          tools="code_interpreter", batch=64, n=8, lr=1e-6, prompt_length=768, response_length=1536,
                          steps=options.steps, validate_every=20, config=KEYS)  # fmt: skip
    print(run.train())
    run.close()


if __name__ == "__main__":
    main()

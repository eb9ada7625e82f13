"""The command `paddock`. Heavy imports happen inside the command that needs them: a wrong key is answered at once."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

from paddock import __version__
from paddock.commands.guard import guarded
from paddock.errors import UserError

USAGE = """\
paddock trains language models with reinforcement learning.

  paddock train [key=value ...]       train; the same as python -m paddock.trainer.main_ppo
  paddock plan [--json] [--gpu NAME] [--rows N] [key=value ...]
                                      show what a run would do, without loading weights
  paddock run [--plan] [--set key=value ...] SCRIPT [args]
                                      run a launch script written for verl, unchanged
  paddock verl on|off|status          give the name `verl` to Paddock: python3 -m verl.trainer.main_ppo starts it
  paddock data NAME [options]         prepare a data set: gsm8k, math, humaneval, mbpp, geo3k, full_hh_rlhf, from-jsonl;
                                      with tools: gsm8k_calculator, gsm8k_tool_agent_loop, gsm8k_multiturn_w_tool;
                                      for sft: gsm8k_sft, gsm8k_calculator_sft, gsm8k_calculator_text_sft
  paddock sft [key=value ...]         warm start: learn the answers of prompt/answer rows
  paddock rm train [key=value ...]    a reward model from preference pairs: prompt, chosen, rejected
  paddock generate output=FILE [key=value ...]
                                      write a model's answers to the prompts of a file, as jsonl or parquet
  paddock eval [--json[=FILE]] [key=value ...]
                                      accuracy, pass@k and maj@k of a model on a file
  paddock export CHECKPOINT OUT [--dtype bf16|fp32]
                                      a checkpoint as a folder that transformers loads
  paddock report RUN [RUN ...] [--out FILE]
                                      one self-contained page: curves, samples and settings of one or more runs
  paddock models list|get NAME [--out FOLDER]
                                      real models that need no hub: smollm2-135m-instruct
  paddock template MODEL              whether its chat template serves several turns: ends of turns, tools, thinking
  paddock keys [WORD ...]             find keys by name and meaning
  paddock doctor [--json]             what this machine can do, and what is missing
  paddock completion bash|zsh|fish    complete commands, keys and values in your shell

`paddock COMMAND --help` has the keys of a command and examples.
Overrides are Hydra's: a.b=c, +a.b=c, ++a.b=c, ~a.b, lists [a,b], --config-path DIR --config-name NAME.
Without a model or data, everything runs on a small embedded default:
  paddock plan algorithm.adv_estimator=grpo
"""


COMMANDS = {
    "train": "paddock.commands.train",
    "plan": "paddock.plan.report",
    "run": "paddock.verl.scripts.run",
    "verl": "paddock.verl.scripts.by_hand",
    "data": "paddock.data.prepare.command",
    "sft": "paddock.commands.sft",
    "rm": "paddock.commands.rm",
    "generate": "paddock.commands.generate",
    "eval": "paddock.commands.eval",
    "export": "paddock.commands.export",
    "report": "paddock.report.command",
    "models": "paddock.models.get",
    "template": "paddock.commands.template",
    "keys": "paddock.help.keys_command",
    "doctor": "paddock.doctor.command",
    "completion": "paddock.help.completion",
}
"""Commands, each with the module whose `run(arguments)` returns the exit code."""
OWN_HELP = ("data", "export", "report", "models", "template")


def main(argv: Sequence[str] | None = None) -> int:
    """The console script."""
    return guarded(_dispatch, list(sys.argv[1:] if argv is None else argv))


def _dispatch(arguments: list[str]) -> int:
    if arguments[:1] == ["help"] and len(arguments) > 1:
        arguments = [*arguments[1:], "--help"]
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(USAGE, end="")
        return 0
    if arguments[0] == "--version":
        print(f"paddock {__version__}")
        return 0
    command = COMMANDS.get(arguments[0])
    if command is None:
        import difflib

        near = difflib.get_close_matches(arguments[0], COMMANDS, n=1)
        fix = f"did you mean `paddock {near[0]}`?" if near else f"commands: {', '.join(COMMANDS)}; see paddock --help"
        raise UserError("no such command", key=arguments[0] or "''", fix=fix)
    if asks_for_help(arguments):
        from paddock.help.show import page_of

        has_options = arguments[0] in OWN_HELP and arguments[0] != "data"  # each data set has options of its own
        print(page_of(arguments[0], arguments[1:], has_options), flush=True)
        if not has_options:
            return 0
        print()
        arguments = [arguments[0], "--help"]
    code: int = import_module(command).run(arguments[1:])
    return code


def asks_for_help(arguments: list[str]) -> bool:
    """True if --help is for us: a script's own arguments, and those of a command with a parser, are left to them."""
    words = arguments[1:2] if arguments[0] in ("run", *OWN_HELP) else arguments[1:]
    return "-h" in words or "--help" in words


if __name__ == "__main__":
    sys.exit(main())

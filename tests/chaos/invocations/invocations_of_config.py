"""Bad invocations whose mistake is in keys and values: known within a second, before torch is imported."""

from __future__ import annotations

from invocation import Case
from invocation_props import closed, empty_folder, link, rows, text

A, M, RO = "actor_rollout_ref.actor", "actor_rollout_ref.model", "actor_rollout_ref.rollout"
GRPO = "algorithm.adv_estimator=grpo"
EMPTY = "the folder holds no data files"


def refused(kind: str, *cases: tuple[str, tuple[str, ...]], command: str = "train") -> list[Case]:
    """Each case is an override, and texts that the answer holds beside its key."""
    short = ("trainer.total_training_steps=1",) if command == "train" else ()  # in case it should train after all
    return [Case(kind, (command, *short, override), (override.lstrip("+~").partition("=")[0], *says))
            for override, says in cases]  # fmt: skip


MISSPELT = [
    *refused(
        "misspelt keys",
        ("data.train_fils=x.parquet", ("no such key", "did you mean data.train_files?")),
        ("data.trian_batch_size=8", ("did you mean data.train_batch_size?",)),
        ("algorithm.adv_estimatr=grpo", ("did you mean algorithm.adv_estimator?",)),
        ("trainer.total_epoch=3", ("did you mean trainer.total_epochs?",)),
        (f"{RO}.temprature=0.5", (f"did you mean {RO}.temperature",)),
        ("actor_rollout.model.path=x", ("no such key",)),
        ("data.foo=1", ("no such key",)),
        ("+new.section.key=1", ("no such key",)),
        ("++data.new=1", ("no such key",)),
        ("~data.nothing", ("no such key",)),
        ("data=x", ("is a section",)),
        ("trainer=null", ("is a section",)),
        (f"{A}.optim=[1]", ("is a section",)),
        ("data.train_files.0=x", ("no such key",)),
        ("trainer.seed.deep=1", ("no such key",)),
        (".data=1", ()),
        ("data.=1", ("cannot be read", "a key is words")),
        ("données.été=1", ("cannot be read", "a key is words")),
        ("custom_reward.path=r.py", ("no such key",)),
    ),
    *refused("misspelt keys", ("algorithm.gama=0.9", ("did you mean algorithm.gamma?",)), command="plan"),
    *refused("misspelt keys", ("data.train_fils=x.parquet", ("no such key",)), command="sft"),
    *refused("misspelt keys", ("data.val_fils=x.parquet", ("no such key",)), command="eval"),
    Case("misspelt keys", ("rm", "train", "modle=x"), ("modle", "no such key")),
    Case("misspelt keys", ("generate", "output=a.jsonl", "rollout.temprature=1"), ("temprature", "no such key")),
]

TYPES = refused(
    "wrong types",
    ("data.train_batch_size=many", ("many", "must be int")),
    ("critic.optim.lr_warmup_steps_ratio=1" + "0" * 320, ("must be float",)),
    ("data.train_batch_size=1.5", ("1.5", "must be int")),
    ("data.train_batch_size=[8]", ("must be int",)),
    ("data.train_batch_size={a:1}", ("must be int",)),
    ("data.train_batch_size=", ("must be int",)),
    ("data.train_batch_size=null", ("cannot be null",)),
    ("data.train_batch_size=True", ("True",)),
    ("algorithm.gamma=high", ("high", "must be float")),
    ("algorithm.gamma=[0.9]", ("must be float",)),
    (f"{A}.optim.lr=1e-", ("1e-", "must be float")),
    (f"{A}.optim.lr=fast", ("fast", "must be float")),
    ("data.shuffle=maybe", ("maybe", "must be bool")),
    ("data.shuffle=2", ("2",)),
    ("trainer.val_before_train=null", ("cannot be null",)),
    ("algorithm.gdpo_reward_keys=accuracy", ("accuracy",)),
    ("algorithm.gdpo_reward_weights=[heavy]", ("heavy",)),
    ("data.apply_chat_template_kwargs=[1]", ()),
    ("data.train_files={a:b}", ("is not a path or a list of paths",)),
    ("data.train_files=[1,2]", ("is not a path or a list of paths",)),
    ("data.train_files=7", ("is not a path or a list of paths",)),
    ("data.val_files=True", ("is not a path or a list of paths",)),
    ("trainer.logger=7", ("no such logger",)),
    ("trainer.logger={a:1}", ("no such logger",)),
    ("reward_model.compute_score_kwargs=strict", ()),
    ("custom_reward_function.path=[a.py]", ("a.py", "no such file")),
    ("trainer.seed=forty", ("forty", "must be int")),
    (f"{M}.path=[a,b]", ("must be",)),
    (f"{M}.path={{a:1}}", ("must be",)),
)

RANGES = refused(
    "out of range",
    ("data.train_batch_size=0", ("must be >= 1",)),
    ("data.train_batch_size=-8", ("must be >= 1",)),
    ("data.max_prompt_length=0", ("must be >= 1",)),
    ("data.max_response_length=-1", ("must be >= 1",)),
    (f"{RO}.n=0", ("must be >= 1",)),
    (f"{RO}.temperature=-1", ("must be",)),
    (f"{RO}.top_p=0", ("must be",)),
    (f"{RO}.top_p=1.5", ("must be",)),
    (f"{RO}.top_k=0", ("must be >= 1, or -1",)),
    (f"{RO}.top_k=-5", ("must be >= 1, or -1",)),
    (f"{RO}.gpu_memory_utilization=2", ("must be <= 1",)),
    (f"{A}.optim.lr=-1", ("must be",)),
    (f"{A}.clip_ratio=-0.2", ("must be",)),
    (f"{A}.ppo_epochs=0", ("must be >= 1",)),
    (f"{A}.optim.clip_grad=-1", ("must be > 0",)),
    ("algorithm.gamma=1.5", ("must be <= 1",)),
    ("algorithm.gamma=0", ("must be > 0",)),
    ("algorithm.lam=-0.1", ("must be >= 0",)),
    ("algorithm.kl_ctrl.kl_coef=-1", ("must be >= 0",)),
    ("trainer.nnodes=0", ("must be >= 1",)),
    ("trainer.n_gpus_per_node=0", ("must be >= 1",)),
    ("trainer.total_epochs=0", ("must be >= 1",)),
    ("trainer.total_training_steps=0", ("must be >= 1",)),
    ("trainer.save_freq=0", ("must be >= 1, or -1",)),
    ("trainer.test_freq=-2", ("must be >= 1, or -1",)),
    ("trainer.max_actor_ckpt_to_keep=0", ("must be >= 1",)),
    ("trainer.seed=99999999999999999999999", ("must be",)),
    (f"{RO}.seed=-99999999999999999999999", ("must be",)),
    ("data.train_max_samples=0", ("must be >= 1, or -1",)),
    ("data.train_max_samples=-7", ("must be >= 1, or -1",)),
    ("data.val_max_samples=0", ("must be >= 1, or -1",)),
    ("reward_model.timeout=0", ("must be > 0",)),
    ("reward_model.num_workers=0", ("must be >= 1",)),
    ("data.dataloader_num_workers=-1", ("must be >= 0",)),
    (f"{M}.lora_rank=-8", ("must be >= 0",)),
    ("reward_model.sandbox_fusion.memory_limit_mb=1", ("must be >= 64",)),
)

NOT_FINITE = refused(
    "NaN and infinite numbers",
    ("algorithm.gamma=nan", ("nan", "is not a number")),
    ("algorithm.gamma=inf", ("inf",)),
    (f"{A}.optim.lr=nan", ("is not a number",)),
    (f"{A}.optim.lr=inf", ("inf",)),
    (f"{A}.optim.lr=-inf", ("-inf",)),
    (f"{RO}.temperature=inf", ("inf",)),
    ("algorithm.kl_ctrl.kl_coef=NaN", ("nan",)),
    ("reward_model.timeout=inf", ("inf",)),
    ("algorithm.gdpo_reward_weights=[nan]", ("nan", "is not a number")),
    ("data.train_batch_size=1e400", ("must be int",)),
    ("data.train_batch_size=inf", ("must be int",)),
)

CHOICES = refused(
    "values that are no choice",
    ("algorithm.adv_estimator=grop", ("no such advantage estimator", "did you mean 'grpo'?")),
    ("algorithm.adv_estimator=", ("no such advantage estimator",)),
    ("algorithm.kl_penalty=k9", ("is not one of the values it takes",)),
    ("trainer.device=tpu", ("is not one of the values it takes", "cuda, npu, cpu")),
    ("trainer.resume_mode=always", ("is not one of the values it takes",)),
    ("trainer.logger=wandbb", ("no such logger", "did you mean 'wandb'?")),
    ("trainer.logger=[console,consle]", ("no such logger",)),
    (f"{RO}.name=vlm", ("is not one of the values it takes",)),
    (f"{RO}.dtype=float7", ("is not one of the values it takes",)),
    (f"{A}.strategy=fsdp3", ("is not one of the values it takes",)),
    (f"{A}.policy_loss.loss_mode=vanila", ("no such policy loss",)),
    (f"{A}.loss_agg_mode=token-maen", ("is not one of the values it takes",)),
    (f"{A}.optim.lr_scheduler_type=linearr", ("is not one of the values it takes",)),
    ("data.truncation=center", ("is not one of the values it takes",)),
    ("reward_model.reward_manager=navie", ("is not one of the values it takes", "did you mean 'naive'?")),
    ("reward_model.sandbox.isolation=none", ("is not one of the values it takes",)),
    ("reward_model.judge.source=oracle", ("is not one of the values it takes",)),
    ("algorithm.rollout_correction.preset=best", ("best",)),
    ("algorithm.rollout_correction.rollout_rs=[x]", ()),
)


def clash(*typed: str, says: tuple[str, ...]) -> Case:
    return Case("contradictory keys", ("train", *typed), says)


CLASHES = [
    clash(GRPO, f"{RO}.n=1", says=(f"{RO}.n=1", "compares the responses")),
    clash("algorithm.adv_estimator=gae", "critic.enable=False", says=("critic.enable=False", "needs a critic")),
    clash("algorithm.adv_estimator=gdpo", says=("algorithm.gdpo_reward_keys", "none is named")),
    clash("algorithm.adv_estimator=gdpo", "algorithm.gdpo_reward_keys=[a,b]", "algorithm.gdpo_reward_weights=[1]",
          says=("algorithm.gdpo_reward_weights", "2 components and 1 weights")),
    clash(GRPO, "data.train_batch_size=8", f"{A}.ppo_mini_batch_size=16", says=(f"{A}.ppo_mini_batch_size=16",)),
    clash(GRPO, "data.train_batch_size=8", f"{A}.ppo_mini_batch_size=3", says=("a divisor of 8",)),
    clash(GRPO, f"{A}.checkpoint.load_contents=[model]", says=(f"{A}.checkpoint.load_contents", "read whole")),
    clash(GRPO, f"{RO}.val_kwargs.do_sample=True", f"{RO}.val_kwargs.temperature=0", says=("needs a temperature",)),
    clash(GRPO, f"{A}.policy_loss.loss_mode=dro", says=(f"{A}.policy_loss.dro_beta=null",)),
    clash(GRPO, f"{A}.policy_loss.loss_mode=bypass_mode", says=("algorithm.rollout_correction.bypass_mode=True",)),
    clash(GRPO, "trainer.resume_mode=resume_path", says=("trainer.resume_from_path", "global_step_N")),
    clash(GRPO, "trainer.resume_mode=resume_path", "trainer.resume_from_path=/tmp/x", says=("/tmp/x", "global_step_N")),
    clash(GRPO, "reward_model.enable=True", says=("reward_model.enable=True", "has no model")),
    clash(GRPO, "reward_model.judge.source=engine", says=("reward_model.judge.source=engine",)),
    clash(GRPO, "reward_model.enable=True", "reward_model.judge.source=endpoint", says=("reward_model.judge.url",)),
    clash(GRPO, "reward_model.enable=True", "reward_model.judge.source=endpoint", "reward_model.judge.url=host",
          "reward_model.judge.model=m", says=("reward_model.judge.url=host", "is not an address")),
    clash(GRPO, "reward_model.enable=True", "reward_model.model.path=builtin:tiny", "reward_model.rule_weight=1",
          says=("reward_model.rule_weight", "the model's weight is not set")),
    clash(GRPO, f"{A}.checkpoint.async_save=True", "trainer.total_training_steps=1",
          says=(f"{A}.checkpoint.async_save=True",)),
    clash(GRPO, f"{A}.checkpoint.save_contents=[weights]", says=(f"{A}.checkpoint.save_contents", "is not one of")),
    clash(GRPO, "actor_rollout_ref.hybrid_engine=False", f"{RO}.name=embedded",
          says=("actor_rollout_ref.hybrid_engine=False",)),
    clash(GRPO, f"{M}.lora.rank=8", says=(f"{M}.lora.rank=8", "Megatron")),
    clash(GRPO, f"{M}.enable_activation_offload=True", f"{M}.enable_gradient_checkpointing=False",
          says=(f"{M}.enable_activation_offload=True",)),
    clash(GRPO, f"{A}.router_replay.mode=R3", says=(f"{A}.router_replay.mode=R3",)),
    clash(GRPO, f"{A}.use_dynamic_bsz=True", f"{A}.ppo_max_token_len_per_gpu=4", says=("ppo_max_token_len_per_gpu=4",)),
    clash(GRPO, "trainer.n_gpus_per_node=3", f"{RO}.tensor_model_parallel_size=2", f"{RO}.name=vllm",
          says=(f"{RO}.tensor_model_parallel_size=2",)),
    clash(GRPO, "trainer.device=npu", says=("trainer.device=npu", "torch_npu")),
    clash(GRPO, "trainer.device=cuda", "trainer.n_gpus_per_node=64", "data.train_files=builtin:addition/train",
          f"{M}.path=builtin:tiny", f"{RO}.name=embedded", says=("trainer.n_gpus_per_node=64",)),
    clash(GRPO, f"{RO}.multi_turn.enable=True", says=(f"{RO}.multi_turn.enable=True", "no tool is named")),
    clash(GRPO, "global_profiler.tool=nsys", says=("global_profiler.tool=nsys", "no profiler is started")),
]  # fmt: skip


def typed(kind: str, *arguments: str, says: tuple[str, ...], command: str = "train") -> Case:
    return Case(kind, (command, *arguments), says)


GRAMMAR = [
    typed("overrides that cannot be read", "data.train_files", says=("data.train_files", "neither a flag nor")),
    typed("overrides that cannot be read", "=5", says=("=5",)),
    typed("overrides that cannot be read", "data.train_files=[a,b", says=("cannot be read",)),
    typed("overrides that cannot be read", "data.train_files='a", says=("cannot be read",)),
    typed("overrides that cannot be read", "data.train_files={a", says=("cannot be read",)),
    typed("overrides that cannot be read", "data.train_files=~/x.parquet", says=("cannot be read", "$HOME")),
    typed("overrides that cannot be read", "data.train_files=a b=c", says=("data.train_files",)),
    typed("overrides that cannot be read", f"data.x={'[' * 3000}", says=("cannot be read",)),
    typed("overrides that cannot be read", "data.train_batch_size=8,16", says=("is a sweep",)),
    typed("overrides that cannot be read", "data.train_batch_size=range(1,5)", says=("is a sweep",)),
    typed("overrides that cannot be read", "data.train_batch_size=choice(1,2)", says=("is a sweep",)),
    typed("overrides that cannot be read", "algorithm@x=y", says=("algorithm@x",)),
    typed("overrides that cannot be read", "data.train_batch_size=int(x", says=("cannot be read",)),
    typed("overrides that cannot be read", "data.train_batch_size=shuffle(3)", says=("data.train_batch_size",)),
    typed("overrides that cannot be read", "-x", says=("-x", "is not a flag")),
    typed("overrides that cannot be read", "--verbose", says=("--verbose", "is not a flag")),
    typed("overrides that cannot be read", "--multirun", says=("--multirun", "one command is one run")),
    typed("overrides that cannot be read", "--cfg", "job", says=("--cfg", "is not taken here")),
    typed("overrides that cannot be read", "", says=("''",)),
    typed("overrides that cannot be read", " =5", says=(" =5",)),
]

LOOPS = [
    typed("interpolations", "data.train_batch_size=${data.train_batch_size}", says=("data.train_batch_size",)),
    typed("interpolations", "data.train_batch_size=${data.gen_batch_size}", says=("data.train_batch_size",)),
    typed("interpolations", "data.prompt_key=${data.nothing}", says=("data.prompt_key", "nothing")),
    typed("interpolations", "data.prompt_key=${oc.env:PADDOCK_NOT_SET}", says=("data.prompt_key", "PADDOCK_NOT_SET")),
    typed("interpolations", "data.prompt_key=${no.such:1}", says=("data.prompt_key",)),
    typed("interpolations", "data.prompt_key=${", says=("data.prompt_key",)),
    typed("interpolations", "data.prompt_key=${data.image_key}", "data.image_key=${data.video_key}",
          "data.video_key=${data.prompt_key}", says=("data.",)),
    typed("interpolations", "data.train_batch_size=${trainer.project_name}", says=("data.train_batch_size",)),
    typed("interpolations", "trainer.default_local_dir=a/${trainer.default_local_dir}",
          says=("trainer.default_local_dir",)),
]  # fmt: skip

STRANGE = [
    typed("control characters and long values", "data.train_files=\x01\x02.parquet", says=("data.train_files",)),
    typed("control characters and long values", "data.train_files=\x1b[31mred.parquet", says=("data.train_files",)),
    typed("control characters and long values", "data.train_files=a\nb.parquet", says=("data.train_files",)),
    typed("control characters and long values", "data.train_files=/データ/x.parquet", says=("/データ/x.parquet",)),
    typed("control characters and long values", f"data.train_files={'x' * 5000}.parquet", says=("data.train_files",)),
    typed("control characters and long values", f"data.train_files=/{'d/' * 3000}x.parquet",
          says=("data.train_files",)),
    typed("control characters and long values", f"{M}.path=/{'m' * 5000}", says=(f"{M}.path", "is no path")),
    typed("control characters and long values", f"{M}.path=./{'m/' * 3000}", says=(f"{M}.path", "is no path")),
    typed("control characters and long values", f"{'a.' * 2000}b=1", says=("no such key",)),
    typed("control characters and long values", f"data.train_batch_size={'9' * 5000}", says=("data.train_batch_size",)),
    typed("control characters and long values", f"data.train_batch_size={'9' * 400}", says=("data.train_batch_size",)),
    typed("control characters and long values", f"trainer.default_local_dir=/tmp/{'y' * 400}", GRPO,
          says=("trainer.default_local_dir",)),
    typed("control characters and long values", f"trainer.total_training_steps={10**30}",
          says=("total_training_steps",)),
]  # fmt: skip

DUPLICATES = [
    typed("duplicated keys", "data.train_batch_size=8", "data.train_batch_size=0", says=("must be >= 1",)),
    typed("duplicated keys", "data.train_batch_size=8", "++data.train_batch_size=many", says=("many",)),
    Case("duplicated keys", ("plan", "--config-name", "twice"), ("twice.yaml", "cannot be read"),
         (text("twice.yaml", "data:\n  shuffle: true\n  shuffle: false\n"),)),
]  # fmt: skip


def file(name: str, content: str | bytes, *says: str, command: str = "plan") -> Case:
    return Case("config files", (command, "--config-path", ".", "--config-name", name), says,
                (text(f"{name}.yaml", content),))  # fmt: skip


FILES = [
    Case("config files", ("train", "--config-name", "nothing"), ("--config-name=nothing", "no nothing.yaml")),
    Case("config files", ("train", "--config-name=nothing"), ("--config-name=nothing",)),
    Case("config files", ("train", "--config-name"), ("--config-name", "needs a value")),
    Case("config files", ("train", "--config-name="), ("--config-name", "needs a value")),
    Case("config files", ("train", "--config-path"), ("--config-path", "needs a value")),
    Case("config files", ("train", "--config-path", "nowhere", "--config-name", "x"), ("--config-name=x", "nowhere")),
    Case("config files", ("plan", "--config-path", ".", "--config-name", "f"), ("--config-name=f",),
         (empty_folder("f.yaml"),)),
    Case("config files", ("plan", "--config-path", ".", "--config-name", "f"), ("f.yaml", "cannot be read"),
         (text("f.yaml", "data: {}"), closed("f.yaml"))),
    Case("config files", ("plan", "--config-path", ".", "--config-name", "f"), ("--config-name=f",),
         (link("f.yaml", "nowhere.yaml"),)),
    file("broken", "data: [1, 2\n", "broken.yaml", "cannot be read"),
    file("tabs", "data:\n\tshuffle: true\n", "tabs.yaml", "cannot be read"),
    file("bytes", b"\xff\xfe\x00\x01", "bytes.yaml", "cannot be read"),
    file("listed", "- a\n- b\n", "listed.yaml", "is not a mapping"),
    file("scalar", "just words\n", "scalar.yaml"),
    file("number", "7\n", "number.yaml"),
    file("unknown", "data:\n  train_fils: x\n", "data.train_fils", "unknown.yaml"),
    file("typed", "data:\n  train_batch_size: many\n", "data.train_batch_size=many"),
    file("numbered", "1: 2\n", "1", "no such key"),
    file("circle", "defaults:\n  - circle\n  - _self_\n", "circle"),
    file("groups", "defaults:\n  - optimizer: adam\n", "config groups are not used here"),
    file("missing", "defaults:\n  - not_there\n", "not_there", "no not_there.yaml in ."),
    file("mapped", "defaults: ppo_trainer\n", "defaults", "is not a list"),
    file("looped", "data:\n  prompt_key: ${data.prompt_key}\n", "data.prompt_key"),
    file("bomb", "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
        f"{chr(98 + i)}: &{chr(98 + i)} [{','.join([f'*{chr(97 + i)}'] * 9)}]\n" for i in range(8)), "bomb.yaml"),
    file("tagged", "data: !!python/object/apply:os.mkdir ['harmed']\n", "tagged.yaml"),
    Case("config files", ("sft", "--config-name", "nothing"), ("--config-name=nothing",)),
    Case("config files", ("eval", "--config-name", "nothing"), ("--config-name=nothing",)),
]  # fmt: skip

PATHS = [
    Case("folders for files", ("plan", "data.train_files=d"), ("data.train_files=d", EMPTY), (empty_folder("d"),)),
    Case("folders for files", ("train", "data.train_files=d"), ("data.train_files=d", EMPTY), (empty_folder("d"),)),
    Case("folders for files", ("train", "data.val_files=d", "data.train_files=t.jsonl"),
         ("data.val_files=d", EMPTY), (rows("t.jsonl"), empty_folder("d"))),
    Case("folders for files", ("train", "data.train_files=[t.jsonl,d]"), ("data.train_files=d", EMPTY),
         (rows("t.jsonl"), empty_folder("d"))),
    Case("folders for files", ("train", "data.train_files=d.parquet"), ("data.train_files=d.parquet", EMPTY),
         (empty_folder("d.parquet"),)),
    Case("folders for files", ("train", "custom_reward_function.path=."),
         ("custom_reward_function.path=.", "is a folder, not a file")),
    Case("folders for files", ("train", "data.custom_cls.path=/tmp", "data.custom_cls.name=X"),
         ("data.custom_cls.path=/tmp", "is a folder, not a file")),
    Case("folders for files", ("train", "data.sampler.class_path=/tmp", "data.sampler.class_name=X"),
         ("data.sampler.class_path=/tmp", "is a folder, not a file")),
    Case("folders for files", ("eval", "data=d"), ("data.val_files=d", EMPTY), (empty_folder("d"),), heavy=True),
    Case("folders for files", ("generate", "output=a.jsonl", "data=d"), ("data.val_files=d", EMPTY),
         (empty_folder("d"),), heavy=True),
    Case("folders for files", ("sft", "data=d", "model=builtin:tiny"), ("data.train_files=d", EMPTY),
         (empty_folder("d"),)),
    Case("folders for files", ("rm", "train", "data=d", "model=builtin:tiny"),
         ("data.train_files=d", EMPTY), (empty_folder("d"),)),
    Case("folders for files", ("run", "/tmp"), ("paddock run /tmp", "is a folder")),
    Case("folders for files", ("data", "from-jsonl", "/tmp"), ("FILE=/tmp", "is no JSON file by its name")),
    Case("folders for files", ("train", f"{M}.path=f", GRPO), (f"{M}.path=f", "is a file, not a folder"),
         (text("f", "x"), )),
    Case("folders for files", ("train", f"{M}.path=./f", GRPO), (f"{M}.path=./f", "is a file, not a folder"),
         (text("f", "x"), )),
    Case("missing files", ("train", "data.train_files=no.parquet"), ("data.train_files=no.parquet", "no such file")),
    Case("missing files", ("train", "data.train_files=/no/such/x.parquet"), ("there is no folder /no/such",)),
    Case("missing files", ("train", "data.train_files=tran.jsonl"), ("did you mean train.jsonl?",),
         (rows("train.jsonl"),)),
    Case("missing files", ("plan", "data.train_files=no.parquet"), ("data.train_files=no.parquet", "no such file")),
    Case("missing files", ("train", "data.train_files=gone.jsonl"), ("data.train_files=gone.jsonl", "no such file"),
         (link("gone.jsonl", "nowhere"),)),
    Case("missing files", ("train", "data.train_files=builtin:addition/trian"), ("builtin:addition/trian",)),
    Case("missing files", ("train", "custom_reward_function.path=no.py"), ("custom_reward_function.path=no.py",)),
    Case("missing files", ("train", "data.custom_cls.path=no.py", "data.custom_cls.name=X"), ("data.custom_cls.path",)),
    Case("missing files", ("train", f"{M}.path=/no/model"), (f"{M}.path=/no/model", "no such folder")),
    Case("missing files", ("train", GRPO, f"{M}.tokenizer_path=/no/tokenizer"), (f"{M}.tokenizer_path=/no/tokenizer",)),
    Case("missing files", ("train", GRPO, "data.tokenizer=/no/tokenizer"), ("data.tokenizer=/no/tokenizer",)),
    Case("missing files", ("train", GRPO, f"{M}.lora_rank=4", f"{M}.lora_adapter_path=/no/adapter"),
         (f"{M}.lora_adapter_path=/no/adapter",)),
    Case("missing files", ("train", GRPO, "reward_model.enable=True", "reward_model.model.path=/no/rm"),
         ("reward_model.model.path=/no/rm", "no such folder")),
    Case("missing files", ("sft", "data=no.jsonl", "model=builtin:tiny"), ("data.train_files=no.jsonl",)),
    Case("missing files", ("rm", "train", "data=no.jsonl", "model=builtin:tiny"), ("data.train_files=no.jsonl",)),
    Case("missing files", ("eval", "model=/no/model"), ("/no/model", "no such folder"), heavy=True),
    Case("missing files", ("eval", "data=no.jsonl"), ("data.val_files=no.jsonl",), heavy=True),
    Case("missing files", ("generate", "output=a.jsonl", "data=no.jsonl"), ("data.val_files=no.jsonl",), heavy=True),
]  # fmt: skip

CASES = [*MISSPELT, *TYPES, *RANGES, *NOT_FINITE, *CHOICES, *CLASHES, *GRAMMAR, *LOOPS, *STRANGE, *DUPLICATES, *FILES,
         *PATHS]  # fmt: skip

"""Bad invocations whose mistake is in a model's folder, its tokenizer, its chat template, or a checkpoint."""

from __future__ import annotations

from invocation import DULL, Case, Maker
from invocation_props import (
    Harmful,
    as_shards,
    checkpoint,
    closed,
    edited,
    empty_folder,
    header,
    lines,
    link,
    model,
    pickled,
    rows,
    tensors,
    text,
    truncated,
    without,
    written,
)

M = "actor_rollout_ref.model"
KEY = f"{M}.path"
TRAIN = ("train", "algorithm.adv_estimator=grpo", "data.val_files=null", "data.train_batch_size=8",
         "actor_rollout_ref.actor.ppo_mini_batch_size=8", "actor_rollout_ref.rollout.n=2", "data.max_prompt_length=64",
         "data.max_response_length=8", "trainer.total_training_steps=1", "trainer.default_local_dir=run",
         "trainer.logger=[console]", "trainer.device=cpu", "trainer.val_before_train=False")  # fmt: skip
TEST = "data=builtin:addition/test"
ADDITION = "data.train_files=builtin:addition/train"


DULL.update(TRAIN[1:], {ADDITION})


def trained(kind: str, about: str, *made: Maker, says: tuple[str, ...]) -> Case:
    return Case(kind, (*TRAIN, f"{KEY}=model", ADDITION), says, made, heavy=True, about=about)


WEIGHTS = "broken weights"
LISTED = {"metadata": {}, "weight_map": {"lm_head.weight": "model-00001-of-00002.safetensors"}}


def first_tensor(weights: dict) -> str:
    return next(name for name, value in weights.items() if value.ndim == 2)


def cut(weights: dict) -> None:
    weights[first_tensor(weights)] = weights[first_tensor(weights)][:3].clone()


def halved(folder) -> None:
    truncated("model.safetensors")(folder)


BROKEN_WEIGHTS = {
    "truncated": (halved, "model.safetensors"),
    "a byte short": (lambda folder: truncated("model.safetensors", 0.99999)(folder), "model.safetensors"),
    "empty": (written("model.safetensors", b""), "model.safetensors"),
    "junk": (written("model.safetensors", b"junk" * 5000), "model.safetensors"),
    "text": (written("model.safetensors", "version https://git-lfs.github.com/spec/v1\n"), "git-lfs"),
    "a header that claims to be longer": (written("model.safetensors", header(10**6)), "model.safetensors"),
    "a header of 2^62 bytes": (written("model.safetensors", header(2**62)), "model.safetensors"),
    "a header that is no JSON": (written("model.safetensors", header(4, b"{{{{")), "model.safetensors"),
    "a header that is a list": (written("model.safetensors", header(2, b"[]")), "model.safetensors"),
    "a header without tensors": (written("model.safetensors", header(2, b"{}")), "tensors"),
    "missing": (without("model.safetensors"), "no weights"),
    "a folder": (lambda f: (without("model.safetensors")(f), empty_folder("model.safetensors")(f)), "model"),
    "a dangling link": (lambda f: (without("model.safetensors")(f), link("model.safetensors", "no")(f)), "model"),
    "unreadable": (closed("model.safetensors"), "model.safetensors"),
    "a missing tensor": (tensors(lambda w: w.pop(first_tensor(w))), "tensor"),
    "all tensors missing": (tensors(lambda w: (w.clear(), w.update(x=__import__("torch").zeros(2)))), "tensors"),
    "a tensor of another shape": (tensors(cut), "shape"),
    "an index that is no JSON": (as_shards("{"), "model.safetensors.index.json"),
    "an index that is a list": (as_shards([]), "model.safetensors.index.json"),
    "an index without a map": (as_shards({"metadata": {}}), "model.safetensors.index.json"),
    "an index with a map of numbers": (as_shards({"weight_map": {"a": 1}}), "model.safetensors.index.json"),
    "an index that names missing files": (
        as_shards({"weight_map": {"lm_head.weight": "model-00002-of-00002.safetensors"}}),
        "model-00002-of-00002.safetensors",
    ),
    "an index that climbs out": (as_shards({"weight_map": {"a": "../../x.safetensors"}}), "x.safetensors"),
    "a shard that is truncated": (
        lambda f: (as_shards(LISTED)(f), truncated("model-00001-of-00002.safetensors")(f)),
        "model-00001-of-00002.safetensors",
    ),
    "a pickle that weights_only refuses": (pickled(lambda: {"a": Harmful()}), "pytorch_model.bin"),
    "a pickle of a list": (pickled(lambda: [1, 2]), "pytorch_model.bin"),
    "a pickle of junk": (
        lambda f: (without("model.safetensors")(f), written("pytorch_model.bin", b"junk" * 999)(f)),
        "pytorch_model.bin",
    ),
    "an empty pickle": (
        lambda f: (without("model.safetensors")(f), written("pytorch_model.bin", b"")(f)),
        "pytorch_model.bin",
    ),
}
CONFIGS = {
    "missing": (without("config.json"), "no config.json"),
    "empty": (written("config.json", ""), "config.json"),
    "no JSON": (written("config.json", "{"), "config.json"),
    "a list": (written("config.json", "[]"), "config.json"),
    "bytes": (written("config.json", b"\xff\xfe\x00"), "config.json"),
    "an unknown model type": (edited("config.json", model_type="llamma9"), "llamma9"),
    "no model type": (edited("config.json", model_type=..., architectures=...), "model"),
    "a text as size": (edited("config.json", hidden_size="large"), "hidden_size"),
    "a negative size": (edited("config.json", hidden_size=-8), "hidden_size"),
    "zero heads": (edited("config.json", num_attention_heads=0), KEY),
    "another number of layers": (edited("config.json", num_hidden_layers=9, layer_types=...), "tensors"),
    "layers that disagree": (edited("config.json", num_hidden_layers=9), "num_hidden_layers"),
    "another width": (edited("config.json", hidden_size=64, intermediate_size=99), "shape"),
    "null layers": (edited("config.json", num_hidden_layers=None), "num_hidden_layers"),
    "an encoder": (edited("config.json", model_type="bert", architectures=["BertModel"]), "model"),
    "code of its own": (
        edited("config.json", model_type="mine", auto_map={"AutoConfig": "mine.Config"}), "trust_remote_code",
    ),
    "unreadable": (closed("config.json"), "config.json"),
}  # fmt: skip
TOKENIZERS = {
    "missing": (without("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"), "tokenizer"),
    "missing tokenizer.json": (without("tokenizer.json"), "tokenizer"),
    "tokenizer.json empty": (written("tokenizer.json", ""), "tokenizer"),
    "tokenizer.json no JSON": (written("tokenizer.json", "{"), "tokenizer"),
    "tokenizer.json another shape": (written("tokenizer.json", "[]"), "tokenizer"),
    "tokenizer.json an empty object": (written("tokenizer.json", "{}"), "tokenizer"),
    "tokenizer.json null": (written("tokenizer.json", "null"), "tokenizer"),
    "tokenizer.json another model": (edited("tokenizer.json", model={"type": "Nope"}), "tokenizer"),
    "tokenizer.json truncated": (truncated("tokenizer.json"), "tokenizer"),
    "tokenizer_config.json no JSON": (written("tokenizer_config.json", "{"), "tokenizer"),
    "tokenizer_config.json a list": (written("tokenizer_config.json", "[]"), "tokenizer"),
    "no end-of-sequence token": (edited("tokenizer_config.json", eos_token=None), "end-of-sequence"),
    "unreadable": (closed("tokenizer.json"), "tokenizer"),
}  # fmt: skip

MODELS = [
    *(trained(WEIGHTS, about, model("model", harm), says=(f"{KEY}=model", says))
      for about, (harm, says) in BROKEN_WEIGHTS.items()),
    *(trained("broken config.json", about, model("model", harm), says=(says,))
      for about, (harm, says) in CONFIGS.items()),
    *(trained("broken tokenizers", about, model("model", harm), says=(f"{KEY}=model", says))
      for about, (harm, says) in TOKENIZERS.items()),
]  # fmt: skip

CHAT = {"prompt": [{"role": "user", "content": "12+34="}]}
TEMPLATES = {
    "never ends": ("{% for i in range(99999) %}{% for j in range(99999) %}{% for k in range(99999) %}"
                   "{% endfor %}{% endfor %}{% endfor %}", "takes longer than"),
    "a range of 10^12": ("{% for i in range(10**12) %}{% endfor %}", "chat template"),
    "a power that never ends": ("{{ 10 ** (10 ** 10) }}", "takes longer than"),
    "a power of what it is given": ("{{ (messages | length + 9) ** (10 ** 10) }}", "takes longer than"),
    "fills the memory": ("{{ 'a' * (10 ** 10) }}", "memory"),
    "grows for ever": ("{% set ns = namespace(x='a') %}{% for i in range(99999) %}"
                       "{% set ns.x = ns.x + ns.x %}{% endfor %}", "chat template"),
    "raises": ("{{ raise_exception('no such role here') }}", "no such role here"),
    "a syntax error": ("{% for %}", "chat template"),
    "an unknown filter": ("{{ messages | nothing }}", "chat template"),
    "an unknown name": ("{{ nothing.at.all }}", "chat template"),
    "calls itself": ("{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}", "chat template"),
    "writes nothing": ("{# nothing #}", "no tokens"),
    "reads a file": ("{% include '/etc/passwd' %}", "chat template"),
    "climbs out": ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "chat template"),
}  # fmt: skip


def written_by(about: str, template: str, says: str) -> Case:
    made = (model("model", written("chat_template.jinja", template)), rows("t.jsonl", **CHAT))
    return Case("chat templates", (*TRAIN, f"{KEY}=model", "data.train_files=t.jsonl"), ("t.jsonl row", says), made,
                heavy=True, about=about)  # fmt: skip


CHATS = [
    *(written_by(about, *template) for about, template in TEMPLATES.items()),
    Case("chat templates", (*TRAIN, f"{KEY}=model", "data.train_files=t.jsonl"), ("t.jsonl row", "no chat template"),
         (model("model", without("chat_template.jinja")), rows("t.jsonl", **CHAT)), heavy=True),
    Case("chat templates", ("sft", "model=model", "data=t.jsonl", "data.train_batch_size=8", "trainer.device=cpu"),
         ("t.jsonl row", "takes longer than"),
         (model("model", written("chat_template.jinja", TEMPLATES["never ends"][0])),
          lines("t.jsonl", *[CHAT | {"answer": "64"}] * 8)), heavy=True),
    Case("chat templates", ("generate", "output=a.jsonl", "model=model", "data=t.jsonl", "trainer.device=cpu"),
         ("t.jsonl row", "takes longer than"),
         (model("model", written("chat_template.jinja", TEMPLATES["never ends"][0])), rows("t.jsonl", **CHAT)),
         heavy=True),
]  # fmt: skip


def stored(*damage, says: tuple[str, ...], typed: tuple[str, ...] = ()) -> Case:
    return Case("broken checkpoints", (*TRAIN, f"{KEY}=builtin:tiny", ADDITION, *typed), says,
                (checkpoint(1, *damage),), heavy=True)  # fmt: skip


def shape(**changes):
    return edited("manifest.json", **changes)


CHECKPOINTS = [
    stored(without("manifest.json"), says=("trainer.default_local_dir=run", "there is no manifest.json")),
    stored(shape(files=[]), says=("trainer.default_local_dir=run", "as this program writes it")),
    stored(shape(format="1"), says=("trainer.default_local_dir=run", "as this program writes it")),
    stored(shape(format=9), says=("trainer.default_local_dir=run", "of a later version")),
    stored(shape(files={"../x": {"size": 1, "sha256": "0"}}), says=("as this program writes it",)),
    stored(written("manifest.json", "[]"), says=("as this program writes it",)),
    stored(truncated("actor/model.safetensors"), says=("actor/model.safetensors has",)),
    stored(without("actor/config.json"), says=("actor/config.json is missing",)),
    stored(closed("manifest.json"), says=("manifest.json", "Permission denied")),
    Case("broken checkpoints", (*TRAIN, f"{KEY}=builtin:tiny", ADDITION), ("run", "it is a file, not a folder"),
         (text("run/global_step_7", "x"),), heavy=True),
    Case("broken checkpoints", (*TRAIN, f"{KEY}=builtin:tiny", ADDITION), ("latest_checkpointed_iteration.txt",),
         (empty_folder("run/latest_checkpointed_iteration.txt"),), heavy=True),
    stored(says=("trainer.resume_from_path=run/global_step_9", "no such folder", "steps there: 1"),
           typed=("trainer.resume_mode=resume_path", "trainer.resume_from_path=run/global_step_9")),
    stored(says=("trainer.resume_from_path=run", "global_step_N"),
           typed=("trainer.resume_mode=resume_path", "trainer.resume_from_path=run")),
    stored(says=("trainer_state",)),
    Case("broken checkpoints", ("export", "run", "out"), ("CHECKPOINT=run", "there is no checkpoint"),
         (empty_folder("run"),), heavy=True),
    Case("broken checkpoints", ("export", "nowhere", "out"), ("CHECKPOINT=nowhere", "no such folder"), heavy=True),
    Case("broken checkpoints", ("export", "f", "out"), ("CHECKPOINT=f", "is a file"), (text("f", "x"),), heavy=True),
    Case("broken checkpoints", ("export", "run", "out"), ("files",), (checkpoint(1, shape(files=[])),), heavy=True),
    Case("broken checkpoints", ("export", "run/global_step_1", "out"), ("CHECKPOINT=run/global_step_1", "is damaged"),
         (checkpoint(1, truncated("actor/model.safetensors")),), heavy=True),
    Case("broken checkpoints", ("export", "m", "out"), ("CHECKPOINT=m", "model.safetensors"),
         (model("m", halved),), heavy=True),
    Case("broken checkpoints", ("export", "m", "out"), ("CHECKPOINT=m", "tokenizer"),
         (model("m", written("tokenizer.json", "{")),), heavy=True),
    Case("broken checkpoints", ("export", "m", "out"), ("CHECKPOINT=m", "tokenizer"),
         (model("m", without("tokenizer.json", "tokenizer_config.json")),), heavy=True),
    Case("broken checkpoints", ("export", "m", "out", "--adapter"), ("--adapter=m", "no adapter"), (model("m"),),
         heavy=True),
    Case("broken checkpoints", ("export", "a", "out"), ("adapter_config.json",),
         (text("a/adapter_config.json", "{"),), heavy=True),
    Case("broken checkpoints", ("export", "a", "out"), ("base_model_name_or_path",),
         (text("a/adapter_config.json", "{}"),), heavy=True),
    Case("broken checkpoints", ("export", "a", "out"), ("/no/base",),
         (text("a/adapter_config.json", '{"base_model_name_or_path": "/no/base"}'),), heavy=True),
    Case("broken checkpoints", ("export", "m", "out"), ("OUT=", "holds something"),
         (model("m"), text("out/x", "x")), heavy=True),
    Case("broken checkpoints", ("export", "m", "out"), ("OUT=", "is a file"), (model("m"), text("out", "x")),
         heavy=True),
    Case("broken checkpoints", ("export", "m", "closed/out"), ("OUT=", "cannot be written"),
         (model("m"), empty_folder("closed"), closed("closed", 0o500)), heavy=True),
    Case("broken checkpoints", ("export", "m", "f/out"), ("OUT=", "cannot be written"), (model("m"), text("f", "x")),
         heavy=True),
    Case("broken checkpoints", ("export", "m", "out", "--max-shard-size", "much"), ("--max-shard-size", "much"),
         (model("m"),), heavy=True),
]  # fmt: skip

OTHERS = [
    Case("broken models of other commands", ("eval", "model=model", TEST), (KEY, "model.safetensors"),
         (model("model", halved),), heavy=True),
    Case("broken models of other commands", ("eval", "model=model", TEST), (KEY, "tokenizer"),
         (model("model", without("tokenizer.json")),), heavy=True),
    Case("broken models of other commands", ("generate", "output=a.jsonl", "model=model", TEST),
         (KEY, "model.safetensors"),
         (model("model", halved),), heavy=True),
    Case("broken models of other commands", ("sft", "model=model", "data=builtin:addition/warmup"),
         (KEY, "model.safetensors"), (model("model", halved),), heavy=True),
    Case("broken models of other commands", ("rm", "train", "model=model", "data=builtin:addition/pairs"),
         (KEY, "model.safetensors"), (model("model", halved),), heavy=True),
    Case("broken models of other commands", ("plan", f"{KEY}=model"), ("config.json",),
         (model("model", written("config.json", "{")),)),
    Case("broken models of other commands", (*TRAIN, f"{KEY}=builtin:tiny", ADDITION, "reward_model.enable=True",
         "reward_model.model.path=model"), ("reward_model.model.path=model", "gives no score"),
         (model("model", halved),), heavy=True),
    Case("broken models of other commands", (*TRAIN, f"{KEY}=builtin:tiny", ADDITION, "reward_model.enable=True",
         "reward_model.model.path=model"), ("reward_model.model.path=model", "model.safetensors"),
         (model("model", halved, edited("config.json", architectures=["Qwen2ForSequenceClassification"])),),
         heavy=True),
    Case("broken models of other commands", (*TRAIN, f"{KEY}=builtin:tiny", ADDITION, f"{M}.lora_rank=4",
         f"{M}.lora_adapter_path=adapter"), ("adapter",), (text("adapter/adapter_config.json", "{"),), heavy=True),
    Case("broken models of other commands", (*TRAIN, f"{KEY}=builtin:tiny", ADDITION, f"{M}.override_config.nope=1"),
         (f"{M}.override_config.nope=1",), heavy=True),
    Case("broken models of other commands", (*TRAIN, f"{KEY}=builtin:tinny", ADDITION), (f"{KEY}=builtin:tinny",),
         heavy=True),
    Case("broken models of other commands", (*TRAIN, f"{KEY}=builtin:tiny", ADDITION, f"{M}.external_lib=no_such_lib"),
         (f"{M}.external_lib=no_such_lib",), heavy=True),
]  # fmt: skip

CASES = [*MODELS, *CHATS, *CHECKPOINTS, *OTHERS]

"""Bad invocations of the commands themselves: names, flags, scripts, and places to write to."""

from __future__ import annotations

from invocation import Case
from invocation_props import closed, empty_folder, link, model, rows, text
from invocations_of_models import TRAIN

TINY = ("actor_rollout_ref.model.path=builtin:tiny", "data.train_files=builtin:addition/train")
NAMES, FLAGS, SCRIPTS, OUTPUT = "commands", "flags", "scripts", "places to write to"

COMMANDS = [
    Case(NAMES, ("trian",), ("trian", "did you mean `paddock train`?")),
    Case(NAMES, ("fly",), ("fly", "no such command")),
    Case(NAMES, ("",), ("no such command",)),
    Case(NAMES, ("--verison",), ("--verison", "no such command")),
    Case(NAMES, ("TRAIN",), ("TRAIN", "no such command")),
    Case(NAMES, ("train\x07",), ("no such command",)),
    Case(NAMES, ("data.train_files=x",), ("no such command",)),
    Case(NAMES, ("rm",), ("paddock rm", "paddock rm train")),
    Case(NAMES, ("rm", "-rf"), ("paddock rm -rf", "paddock rm train")),
    Case(NAMES, ("rm", "trian"), ("paddock rm trian",)),
    Case(NAMES, ("models", "fetch"), ("fetch",)),
    Case(NAMES, ("models", "get"), ("name",)),
    Case(NAMES, ("models", "get", "smolm"), ("paddock models get smolm",)),
    Case(NAMES, ("models", "get", "smollm2-135m-instruct", "--out", "f"), ("--out", "is a file"), (text("f", "x"),)),
    Case(NAMES, ("models", "get", "smollm2-135m-instruct", "--out", "d"), ("--out", "holds something"),
         (text("d/x", "x"),)),
    Case(NAMES, ("models", "list", "--all"), ("--all",)),
    Case(NAMES, ("export",), ("checkpoint",)),
    Case(NAMES, ("export", "a"), ("out",)),
    Case(NAMES, ("export", "a", "b", "c"), ("c",)),
    Case(NAMES, ("export", "a", "b", "--dtype", "int4"), ("--dtype", "int4")),
    Case(NAMES, ("export", "a", "b", "--max-shard-size", "-5"), ("--max-shard-size",)),
    Case(NAMES, ("export", "a", "b", "--adaptr"), ("--adaptr",)),
    Case(NAMES, ("template",), ("MODEL",)),
    Case(NAMES, ("template", "./nowhere"), ("MODEL=./nowhere",)),
    Case(NAMES, ("template", "builtin:tiny", "--format", "herms"), ("multi_turn.format=herms", "hermes")),
    Case(FLAGS, ("keys", "zzzzqq"), ("paddock keys zzzzqq", "no key has this name")),
    Case(FLAGS, ("keys", "--bad"), ("--bad", "is not a flag")),
    Case(FLAGS, ("report",), ("paddock report", "RUN")),
    Case(FLAGS, ("report", "nowhere"), ("paddock report nowhere", "no such folder")),
    Case(FLAGS, ("report", "--out"), ("--out", "expected one argument")),
    Case(FLAGS, ("doctor", "envx"), ("paddock doctor envx", "no such thing")),
    Case(FLAGS, ("doctor", "env", "--bad"), ("--bad", "is not a flag")),
    Case(FLAGS, ("completion",), ("paddock completion", "which shell")),
    Case(FLAGS, ("verl", "maybe"), ("paddock verl maybe", "on|off|status")),
    Case(FLAGS, ("verl", "on", "off"), ("paddock verl on off", "takes one word")),
    Case(FLAGS, ("completion", "tcsh"), ("paddock completion tcsh", "which shell")),
    Case(FLAGS, ("plan", "--gpu", "h9000"), ("--gpu=h9000", "no such GPU")),
    Case(FLAGS, ("plan", "--gpu"), ("--gpu",)),
    Case(FLAGS, ("plan", "--gpu", "\x1b]0;mine\x07h100"), ("no such GPU",)),
    Case(FLAGS, ("plan", "--rows", "many"), ("--rows=many",)),
    Case(FLAGS, ("plan", "--rows", "0"), ("--rows=0",)),
    Case(FLAGS, ("plan", "--rows=-4"), ("--rows=-4",)),
    Case(FLAGS, ("plan", "--rows", "\u0664"), ("--rows",)),
    Case(FLAGS, ("plan", "--rows", "9" * 5000), ("--rows",)),
    Case(FLAGS, ("plan", "--jsn"), ("--jsn", "is not a flag")),
    Case(FLAGS, ("plan", "--json=file"), ("--json=file",)),
    Case(FLAGS, ("eval", "--json="), ("--json", "needs a file name")),
    Case(FLAGS, ("eval", "--jsn"), ("--jsn", "is not a flag")),
    Case(FLAGS, ("generate",), ("output", "no file to write is named")),
    Case(FLAGS, ("generate", "output="), ("output",)),
    Case(FLAGS, ("generate", "output=a.csv"), ("output=a.csv", "is not a .jsonl or .parquet file")),
    Case(FLAGS, ("generate", "output=a"), ("output=a",)),
    Case(FLAGS, ("generate", "output=a.jsonl", "n=0"), ("rollout.n=0", "must be >= 1")),
    Case(FLAGS, ("sft", "--epochs", "3"), ("--epochs", "is not a flag")),
    Case(FLAGS, ("sft", "optim.lr=-1", "model=builtin:tiny", "data=builtin:addition/warmup"), ("optim.lr=-1",)),
    Case(FLAGS, ("eval", "n=2"), ("n=2", "no such key")),
]  # fmt: skip


def script(content: str | bytes, *says: str, name: str = "s.sh", flags: tuple[str, ...] = (), about: str = "") -> Case:
    return Case(SCRIPTS, ("run", *flags, name), says, (text(name, content),), about=about)


CALL = "python3 -m verl.trainer.main_ppo"
RUN = [
    Case(SCRIPTS, ("run",), ("paddock run",)),
    Case(SCRIPTS, ("run", ""), ("paddock run",)),
    Case(SCRIPTS, ("run", "--plan"), ("paddock run",)),
    Case(SCRIPTS, ("run", "--set"), ("paddock run --set", "needs key=value")),
    Case(SCRIPTS, ("run", "--set", "nonsense", "s.sh"), ("paddock run --set nonsense",), (text("s.sh", CALL),)),
    Case(SCRIPTS, ("run", "nowhere.sh"), ("paddock run nowhere.sh", "no such file")),
    Case(SCRIPTS, ("run", "s.hs"), ("did you mean s.sh?",), (text("s.sh", CALL),)),
    Case(SCRIPTS, ("run", "gone.sh"), ("paddock run gone.sh",), (link("gone.sh", "nowhere"),)),
    Case(SCRIPTS, ("run", "s.sh"), ("paddock run s.sh", "Permission denied"), (text("s.sh", CALL), closed("s.sh"))),
    Case(SCRIPTS, ("run", "--paln", "s.sh"), ("--paln",), (text("s.sh", CALL),)),
    script("", "paddock run s.sh", "starts nothing", about="empty"),
    script("# only words\n", "paddock run s.sh", "starts nothing", about="a comment"),
    script("set -x\necho done\n", "paddock run s.sh", "starts nothing", about="echo"),
    script("", "paddock run s.py", "starts nothing", name="s.py", about="empty"),
    script("print('hello')\n", "paddock run s.py", "starts nothing", name="s.py", about="print"),
    script("", "paddock run --plan s.sh", "starts no training", flags=("--plan",), about="empty"),
    script("", "paddock run --plan s.py", "starts no training", flags=("--plan",), name="s.py", about="empty"),
    script("python3 train_other.py\n", "paddock run", flags=("--plan",), about="another program"),
    script("if then\n", "paddock run s.sh", "cannot be run", about="a syntax error"),
    script("def (:\n", "paddock run s.py", "cannot be run", name="s.py", about="a syntax error"),
    script(b"\x7fELF\x02\x01\x01\x00" + bytes(99), "paddock run s.sh", about="a binary"),
    script(b"\x00", "zero bytes", name="s.py", about="a zero byte"),
    script(f"{CALL} data.train_fils=x\n", "data.train_fils", "no such key", about="a misspelt key"),
    script(f"{CALL} data.train_fils=x\n", "data.train_fils", "no such key", flags=("--plan",), about="a misspelt key"),
]

WRITTEN = [
    Case(OUTPUT, (*TRAIN, *TINY, "trainer.default_local_dir=f"), ("trainer.default_local_dir=f", "is a file"),
         (text("f", "x"),)),
    Case(OUTPUT, (*TRAIN, *TINY, "trainer.default_local_dir=f/run"), ("trainer.default_local_dir=f/run", "is a file"),
         (text("f", "x"),)),
    Case(OUTPUT, (*TRAIN, *TINY, "trainer.default_local_dir=d/run"), ("trainer.default_local_dir=d/run",),
         (empty_folder("d"), closed("d", 0o500))),
    Case(OUTPUT, (*TRAIN, *TINY, "trainer.default_local_dir=/proc/run"), ("trainer.default_local_dir=/proc/run",),
         heavy=True),
    Case(OUTPUT, (*TRAIN, *TINY, "trainer.default_local_dir=gone"), ("trainer.default_local_dir=gone",),
         (link("gone", "nowhere/at/all"),)),
    Case(OUTPUT, (*TRAIN, *TINY, "trainer.default_local_dir="), ("trainer.default_local_dir", "is empty")),
    Case(OUTPUT, (*TRAIN, *TINY, "trainer.rollout_data_dir=f"), ("trainer.rollout_data_dir=f", "is a file"),
         (text("f", "x"),)),
    Case(OUTPUT, (*TRAIN, *TINY, "trainer.validation_data_dir=d/x"), ("trainer.validation_data_dir=d/x",),
         (empty_folder("d"), closed("d", 0o500))),
    Case(OUTPUT, ("sft", "trainer.default_local_dir=f"), ("trainer.default_local_dir=f", "is a file"),
         (text("f", "x"),)),
    Case(OUTPUT, ("rm", "train", "trainer.default_local_dir=f"), ("trainer.default_local_dir=f", "is a file"),
         (text("f", "x"),)),
    Case(OUTPUT, ("eval", "--json=d"), ("--json=d", "is a folder"), (empty_folder("d"),)),
    Case(OUTPUT, ("eval", "--json=d/a.json"), ("--json",), (empty_folder("d"), closed("d", 0o500))),
    Case(OUTPUT, ("eval", "--json=f/a.json"), ("--json", "is a file"), (text("f", "x"),)),
    Case(OUTPUT, ("generate", "output=d.jsonl"), ("output=d.jsonl", "is a folder"), (empty_folder("d.jsonl"),)),
    Case(OUTPUT, ("generate", "output=d/a.jsonl"), ("output",), (empty_folder("d"), closed("d", 0o500))),
    Case(OUTPUT, ("generate", "output=f/a.jsonl"), ("output", "is a file"), (text("f", "x"),)),
    Case(OUTPUT, ("export", "m", "/proc/out"), ("OUT=/proc/out",), (model("m"),), heavy=True),
    Case(OUTPUT, (*TRAIN, TINY[0], "data.train_files=t.jsonl", "data.val_files=d"), ("data.val_files=d",),
         (rows("t.jsonl"), empty_folder("d"))),
]  # fmt: skip

CASES = [*COMMANDS, *RUN, *WRITTEN]

"""Bad invocations whose mistake is in data files, in scorers, or in a user's own classes."""

from __future__ import annotations

import json

from invocation import Case, Maker
from invocation_props import (
    ANSWERED,
    PAIR,
    ROW,
    changed,
    closed,
    empty_folder,
    lines,
    parquet,
    rows,
    text,
    truncated,
    zipped,
)
from invocations_of_models import KEY, TRAIN

TINY = f"{KEY}=builtin:tiny"
FILES = "broken data files"


def read(about: str, name: str, *made: Maker, says: tuple[str, ...], heavy: bool = True, kind: str = FILES) -> Case:
    return Case(kind, (*TRAIN, TINY, f"data.train_files={name}"), says, made, heavy=heavy, about=about)


def column(about: str, *says: str, **changes: object) -> Case:
    """Rows of which the last one differs from the others in these columns."""
    good = [ROW] * 7
    return Case("wrong columns and rows", (*TRAIN, TINY, "data.train_files=t.jsonl"), says,
                (lines("t.jsonl", *good, changed(ROW, **changes)),), heavy=True, about=about)  # fmt: skip


BROKEN = [
    read("junk", "t.parquet", text("t.parquet", b"junk" * 99), says=("t.parquet", "cannot be read"), heavy=False),
    read("empty", "t.parquet", text("t.parquet", ""), says=("t.parquet", "cannot be read"), heavy=False),
    read("truncated", "t.parquet", parquet("t.parquet", *[ROW] * 99), truncated("t.parquet"),
         says=("t.parquet", "cannot be read"), heavy=False),
    read("its middle is zeros", "t.parquet", parquet("t.parquet", *[changed(ROW, prompt=f"{i}=") for i in range(999)]),
         lambda folder: zeroed(folder / "t.parquet"), says=("t.parquet", "cannot be read")),
    read("no rows", "t.parquet", parquet("t.parquet", ROW), lambda folder: no_rows(folder / "t.parquet"),
         says=("t.parquet", "holds no rows"), heavy=False),
    read("text", "t.parquet", text("t.parquet", json.dumps(ROW)), says=("t.parquet", "cannot be read"), heavy=False),
    read("unreadable", "t.parquet", parquet("t.parquet", ROW), closed("t.parquet"),
         says=("t.parquet", "Permission denied"), heavy=False),
    read("in a closed folder", "d/t.parquet", empty_folder("d"), closed("d"), says=("d/t.parquet",), heavy=False),
    read("empty", "t.jsonl", text("t.jsonl", ""), says=("data.train",), heavy=False),
    read("blank lines", "t.jsonl", text("t.jsonl", "\n\n \n"), says=("data.train",), heavy=False),
    read("no JSON", "t.jsonl", text("t.jsonl", "{\n" * 9), says=("t.jsonl row 0", "not JSON")),
    read("a last line cut short", "t.jsonl", rows("t.jsonl", 9), truncated("t.jsonl", 0.97),
         says=("t.jsonl row 8", "not JSON")),
    read("lists", "t.jsonl", text("t.jsonl", "[1]\n" * 9), says=("t.jsonl row 0", "a row must be a JSON object")),
    read("numbers", "t.jsonl", text("t.jsonl", "7\n" * 9), says=("t.jsonl row 0", "a row must be a JSON object")),
    read("bytes", "t.jsonl", text("t.jsonl", b"\xff\xfe\x00\x01\n" * 9), says=("t.jsonl",), heavy=False),
    read("UTF-16", "t.jsonl", text("t.jsonl", (json.dumps(ROW) + "\n").encode("utf-16") * 9), says=("t.jsonl",)),
    read("unreadable", "t.jsonl", rows("t.jsonl"), closed("t.jsonl"), says=("t.jsonl", "Permission denied"),
         heavy=False),
    read("nested a million deep", "t.jsonl", text("t.jsonl", ("[" * 10**6 + "\n") * 9), says=("t.jsonl",)),
    read("a number of 5000 digits", "t.jsonl", text("t.jsonl", ('{"prompt": ' + "9" * 5000 + "}\n") * 9),
         says=("t.jsonl row 0",)),
    read("no JSON", "t.json", text("t.json", "{"), says=("t.json", "cannot be read"), heavy=False),
    read("an object", "t.json", text("t.json", "{}"), says=("t.json", "holds no list"), heavy=False),
    read("numbers", "t.json", text("t.json", "[1, 2]"), says=("t.json", "row 0 is no object"), heavy=False),
    read("nested a million deep", "t.json", text("t.json", "[" * 10**6), says=("t.json",), heavy=False),
    read("empty list", "t.json", text("t.json", "[]"), says=("data.train",), heavy=False),
    read("CSV without rows", "t.csv", text("t.csv", "a,b\n"), says=("t.csv", "holds no rows"), heavy=False),
    read("a suffix of no format", "t.xls", text("t.xls", "x"), says=("t.xls", "not a data file"), heavy=False),
    read("no suffix", "t", text("t", "x"), says=("data.train_files=t", "not a data file"), heavy=False),
    read("fewer rows than a batch", "t.jsonl", rows("t.jsonl", 3), says=("data.train_batch_size=8",)),
]  # fmt: skip


def zeroed(file) -> None:
    content = bytearray(file.read_bytes())
    middle = len(content) // 4
    content[middle : middle + 400] = bytes(400)
    file.write_bytes(content)


def no_rows(file) -> None:
    from pyarrow import parquet as files

    files.write_table(files.read_table(file).slice(0, 0), file)


COLUMNS = [
    read("no prompt", "t.jsonl", rows("t.jsonl", prompt=...), says=("no column 'prompt'", "data.prompt_key"),
         kind="wrong columns and rows", heavy=False),
    read("no source", "t.jsonl", rows("t.jsonl", data_source=...), says=("no column 'data_source'",),
         kind="wrong columns and rows"),
    read("no truth", "t.jsonl", rows("t.jsonl", reward_model=...), says=("no column 'reward_model'",),
         kind="wrong columns and rows"),
    column("prompt null", "t.jsonl row 7", "'prompt'", prompt=None),
    column("prompt empty", "t.jsonl row 7", "is empty", prompt=""),
    column("prompt a number", "t.jsonl row 7", "'prompt'", prompt=7),
    column("prompt an empty list", "t.jsonl row 7", "is empty", prompt=[]),
    column("prompt a list of texts", "t.jsonl row 7", "has no role", prompt=["12+34="]),
    column("a message without a role", "t.jsonl row 7", "has no role", prompt=[{"content": "x"}]),
    column("a message without content", "t.jsonl row 7", "has no content", prompt=[{"role": "user"}]),
    column("a role that is a number", "t.jsonl row 7", "has no role", prompt=[{"role": 1, "content": "x"}]),
    column("a message of empty text", "t.jsonl row 7", "no tokens", prompt=[{"role": "user", "content": ""}]),
    column("half of a surrogate pair", "t.jsonl row 7", "surrogate", prompt="a\ud800b"),
    column("half of a pair in a message", "t.jsonl row 7", prompt=[{"role": "user", "content": "\udfff"}]),
    column("a content that is a number", "t.jsonl row 7", prompt=[{"role": "user", "content": 12}]),
    column("source null", "t.jsonl row 7", "'data_source'", data_source=None),
    column("source a number", "t.jsonl row 7", "'data_source'", data_source=5),
    column("source empty", "t.jsonl row 7", "'data_source'", data_source=""),
    column("a source that nobody scores", "data_source=my/set", "no scorer is known", data_source="my/set"),
    column("truth null", "t.jsonl row 7", "'reward_model'", reward_model=None),
    column("truth a text", "t.jsonl row 7", "'reward_model'", reward_model="64"),
    column("truth without ground_truth", "t.jsonl row 7", "has no ground_truth", reward_model={"style": "rule"}),
    column("truth null inside", "t.jsonl row 7", "has no ground_truth",
           reward_model={"style": "rule", "ground_truth": None}),
    *(read(f"the truth {truth!r}", "t.jsonl", rows("t.jsonl", reward_model={"style": "rule", "ground_truth": truth}),
           says=("t.jsonl row 0", "ground truth"), kind="wrong columns and rows")
      for truth in ([64], {"a": 1}, True, 6.4)),
    column("extra_info a text", "t.jsonl row 7", "'extra_info'", extra_info="x"),
    column("extra_info a list", "t.jsonl row 7", "'extra_info'", extra_info=[1]),
    column("images without a model that sees", "t.jsonl row 7", "'images'", images=["a.png"]),
    column("videos", "t.jsonl row 7", "'videos'", videos=["a.mp4"]),
    Case("wrong columns and rows", (*TRAIN, TINY, "data.train_files=t.jsonl", "data.filter_overlong_prompts=False"),
         ("data.max_prompt_length=64", "500 tokens"), (rows("t.jsonl", prompt="1" * 500),), heavy=True),
    Case("wrong columns and rows", (*TRAIN, TINY, "data.train_files=t.jsonl"),
         ("data.max_prompt_length=64", "every prompt"), (rows("t.jsonl", prompt="1" * 500),), heavy=True),
    Case("wrong columns and rows", (*TRAIN, TINY, "data.train_files=t.jsonl", "data.prompt_key=question"),
         ("no column 'question'",), (rows("t.jsonl"),), heavy=True),
    Case("wrong columns and rows", (*TRAIN, TINY, "data.train_files=t.jsonl", "data.reward_fn_key=source"),
         ("no column 'source'",), (rows("t.jsonl"),), heavy=True),
    Case("wrong columns and rows", (*TRAIN, TINY, "data.train_files=t.parquet"), ("t.parquet row 0", "'prompt'"),
         (parquet("t.parquet", *[changed(ROW, prompt=None)] * 8),), heavy=True),
    Case("wrong columns and rows", (*TRAIN, TINY, "data.train_files=t.jsonl"), ("t.jsonl row 0", "ground truth"),
         (rows("t.jsonl", data_source="openai/gsm8k", reward_model={"style": "rule", "ground_truth": "many"}),),
         heavy=True),
    Case("wrong columns and rows", (*TRAIN, TINY, "data.train_files=t.jsonl"), ("t.jsonl row 0",),
         (rows("t.jsonl", data_source="openai/openai_humaneval"),), heavy=True),
    Case("wrong columns and rows", (*TRAIN, TINY, "data.train_files=t.jsonl"), ("t.jsonl row 0",),
         (rows("t.jsonl", data_source="codecontests"),), heavy=True),
    Case("wrong columns and rows", (*TRAIN, TINY, "data.train_files=t.jsonl"), ("t.jsonl row 0",),
         (rows("t.jsonl", data_source="searchR1_nq", reward_model={"style": "rule", "ground_truth": 5}),), heavy=True),
    Case("wrong columns and rows", ("eval", "model=builtin:tiny", "data=t.jsonl", "trainer.device=cpu"),
         ("no column 'reward_model'",), (rows("t.jsonl", reward_model=...),), heavy=True),
    Case("wrong columns and rows", ("generate", "model=builtin:tiny", "data=t.jsonl", "output=a.jsonl"),
         ("no column 'prompt'",), (rows("t.jsonl", prompt=...),), heavy=True),
    Case("wrong columns and rows", ("generate", "model=builtin:tiny", "data=t.jsonl", "output=a.jsonl"),
         ("t.jsonl", "'responses'"), (rows("t.jsonl", responses=[]),), heavy=True),
]  # fmt: skip


def learnt(command: tuple[str, ...], row: dict, about: str, *says: str, **changes: object) -> Case:
    typed = (*command, "model=builtin:tiny", "data=t.jsonl", "data.train_batch_size=8", "trainer.device=cpu",
             "trainer.default_local_dir=run", "trainer.total_training_steps=1")  # fmt: skip
    return Case("rows to learn from", typed, says, (lines("t.jsonl", *[row] * 7, changed(row, **changes)),), heavy=True,
                about=about)  # fmt: skip


LEARNT = [
    learnt(("sft",), ANSWERED, "no answer", "t.jsonl row 7", "there is no answer", answer=...),
    learnt(("sft",), ANSWERED, "answer null", "t.jsonl row 7", answer=None),
    learnt(("sft",), ANSWERED, "answer a number", "t.jsonl row 7", "not the text of an answer", answer=64),
    learnt(("sft",), ANSWERED, "answer empty", "t.jsonl row 7", "not the text of an answer", answer=""),
    learnt(("sft",), ANSWERED, "answer a list", "t.jsonl row 7", answer=["64"]),
    learnt(("sft",), ANSWERED, "half of a surrogate pair", "t.jsonl row 7", "surrogate", answer="\ud800"),
    learnt(("sft",), ANSWERED, "prompt null", "t.jsonl row 7", "'prompt'", prompt=None),
    learnt(("sft",), {"riddle": "a", "answer": "b"}, "no prompt", "no column 'prompt'"),
    learnt(("sft",), ANSWERED, "a message of empty text", "t.jsonl row 7", prompt=[{"role": "user", "content": ""}]),
    learnt(("rm", "train"), PAIR, "chosen null", "t.jsonl row 7", "'chosen'", chosen=None),
    learnt(("rm", "train"), PAIR, "rejected missing", "t.jsonl row 7", "'rejected'", rejected=...),
    learnt(("rm", "train"), PAIR, "chosen a number", "t.jsonl row 7", "'chosen'", chosen=64),
    learnt(("rm", "train"), PAIR, "chosen equals rejected", "t.jsonl row 7", rejected="64"),
    learnt(("rm", "train"), ANSWERED, "no pairs", "'chosen'"),
    learnt(("rm", "train"), PAIR, "prompt empty", "t.jsonl row 7", prompt=""),
    learnt(("rm", "train"), PAIR, "half of a surrogate pair", "t.jsonl row 7", "surrogate", chosen="\udfff"),
]


def scored(about: str, code: str, *says: str, typed: tuple[str, ...] = ()) -> Case:
    arguments = (*TRAIN, TINY, "data.train_files=builtin:addition/train", "custom_reward_function.path=reward.py")
    return Case("broken reward functions", (*arguments, *typed), ("reward.py", *says), (text("reward.py", code),),
                heavy=True, about=about)  # fmt: skip


TAKES = "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
REWARDS = [
    scored("a syntax error", "def compute_score(:\n", "SyntaxError"),
    scored("an empty file", "", "has no function 'compute_score'"),
    scored("another name", TAKES.replace("_score(", "_scores(") + "    return 1.0\n", "did you mean"),
    scored("a name that is no function", "compute_score = 5\n", "has no function 'compute_score'"),
    scored("wrong arguments", "def compute_score(reply):\n    return 1.0\n", "it may name completion"),
    scored("no arguments", "def compute_score():\n    return 1.0\n", "takes nothing of what it is given"),
    scored("raises at import", "raise RuntimeError('not today')\n", "not today"),
    scored("ends the process at import", "import sys\nsys.exit(0)\n", "SystemExit"),
    scored("imports what is not there", "import no_such_package_at_all\n", "no_such_package_at_all"),
    scored("raises", TAKES + "    raise KeyError('truth')\n", "KeyError", "line 2"),
    scored("returns None", TAKES + "    return None\n", "None"),
    scored("returns a text", TAKES + "    return 'good'\n", "good"),
    scored("returns NaN", TAKES + "    return float('nan')\n", "nan"),
    scored("returns infinity", TAKES + "    return float('inf')\n", "inf"),
    scored("returns a dict without score", TAKES + "    return {'acc': 1}\n", "score"),
    scored("ends the process", TAKES + "    import os; os._exit(0)\n"),
    scored("never ends", TAKES + "    while True: pass\n", "reward_model.timeout", typed=("reward_model.timeout=2",)),
    scored("bytes", "\x00\x01", "reward.py"),
    scored("an unknown argument", TAKES + "    return 1.0\n", "nope",
           typed=("custom_reward_function.reward_kwargs.nope=1",)),
    Case("broken reward functions", (*TRAIN, TINY, "data.train_files=builtin:addition/train",
         "custom_reward_function.path=pkg://no.such.module"), ("no.such.module",), heavy=True),
    Case("broken reward functions", (*TRAIN, TINY, "data.train_files=t.jsonl",
         "reward_model.compute_score_kwargs.method=loose"), ("method",),
         (rows("t.jsonl", data_source="openai/gsm8k"),), heavy=True),
    Case("broken reward functions", (*TRAIN, TINY, "data.train_files=builtin:addition/train",
         "reward_model.compute_score_kwargs.mthod=strict"), ("mthod",), heavy=True),
    Case("broken reward functions", (*TRAIN, TINY, "data.train_files=builtin:addition/train",
         "custom_reward_function.path=reward.py"), ("reward.py", "Permission denied"),
         (text("reward.py", TAKES + "    return 1.0\n"), closed("reward.py")), heavy=True),
]  # fmt: skip


def plugged(about: str, code: str, *says: str, name: str = "Rows") -> Case:
    typed = (*TRAIN, TINY, "data.train_files=builtin:addition/train", "data.custom_cls.path=mine.py",
             f"data.custom_cls.name={name}")  # fmt: skip
    return Case("broken plug-ins", typed, ("data.custom_cls", *says), (text("mine.py", code),), heavy=True, about=about)


SAMPLER = ("data.sampler.class_path=mine.py", "data.sampler.class_name=Order")


def ordered(about: str, code: str, *says: str) -> Case:
    typed = (*TRAIN, TINY, "data.train_files=builtin:addition/train", *SAMPLER)
    return Case("broken plug-ins", typed, ("data.sampler", *says), (text("mine.py", code),), heavy=True, about=about)


PLUGINS = [
    plugged("a syntax error", "class Rows(:\n", "SyntaxError"),
    plugged("an empty file", "", "is no class of mine.py"),
    plugged("another name", "class Row: pass\n", "is no class of mine.py"),
    plugged("raises at import", "1 / 0\n", "ZeroDivisionError"),
    plugged("ends the process at import", "raise SystemExit(0)\n", "SystemExit"),
    plugged("raises when made", "class Rows:\n    def __init__(self, **k): raise RuntimeError('no')\n", "RuntimeError"),
    plugged("no length", "class Rows:\n    def __getitem__(self, i): return {}\n", "__len__"),
    plugged("no items", "class Rows:\n    def __len__(self): return 9\n", "__getitem__"),
    plugged("items that are no rows", "class Rows:\n    def __len__(self): return 9\n"
            "    def __getitem__(self, i): return 5\n", "not a dict"),
    plugged("items that raise", "class Rows:\n    def __len__(self): return 9\n"
            "    def __getitem__(self, i): raise IOError('gone')\n", "gone"),
    plugged("a length that is a text", "class Rows:\n    def __len__(self): return 'nine'\n"
            "    def __getitem__(self, i): return {}\n", "Rows"),
    ordered("a syntax error", "class Order(:\n", "SyntaxError"),
    ordered("raises", "class Order:\n    def __init__(self, data_source, data_config): pass\n"
            "    def __iter__(self): raise ValueError('lost')\n", "lost"),
    ordered("positions beyond the end", "class Order:\n    def __init__(self, data_source, data_config): pass\n"
            "    def __iter__(self): return iter([10**9])\n", "position"),
    ordered("texts", "class Order:\n    def __init__(self, data_source, data_config): pass\n"
            "    def __iter__(self): return iter(['a'])\n", "Order"),
    ordered("nothing", "class Order:\n    def __init__(self, data_source, data_config): pass\n"
            "    def __iter__(self): return iter([])\n", "no position"),
    Case("broken plug-ins", (*TRAIN, TINY, "data.train_files=builtin:addition/train",
         "actor_rollout_ref.model.external_lib=mine"), ("external_lib=mine", "SyntaxError"),
         (text("mine.py", "def (:\n"),), heavy=True, about="a syntax error"),
]  # fmt: skip

PREPARED = [
    Case("paddock data", ("data",), ("paddock data", "which data set?")),
    Case("paddock data", ("data", "gsm9k"), ("paddock data gsm9k", "did you mean 'gsm8k'?")),
    Case("paddock data", ("data", "imagenet"), ("paddock data imagenet",)),
    Case("paddock data", ("data", "gsm8k", "--no-such-flag"), ("--no-such-flag",)),
    Case("paddock data", ("data", "gsm8k", "--local_save_dir"), ("--local_save_dir",)),
    Case("paddock data", ("data", "gsm8k", "--local_save_dir", ""), ("--local_save_dir", "is empty")),
    Case("paddock data", ("data", "gsm8k", "--local_dataset_path", "nowhere"), ("--local_dataset_path", "no such")),
    Case("paddock data", ("data", "gsm8k", "--local_dataset_path", "f"), ("--local_dataset_path", "is a file"),
         (text("f", "x"),)),
    Case("paddock data", ("data", "gsm8k", "--local_dataset_path", "d"), ("--local_dataset_path",),
         (empty_folder("d"),)),
    Case("paddock data", ("data", "gsm8k", "--local_dataset_path", "d", "--local_save_dir", "o"),
         ("no test file",), (lines("d/train.jsonl", {"question": "q", "answer": "#### 1"}),)),
    Case("paddock data", ("data", "gsm8k", "--local_dataset_path", "d", "--local_save_dir", "o"),
         ("train.jsonl row 0",), (text("d/train.jsonl", "{"), text("d/test.jsonl", "{"))),
    Case("paddock data", ("data", "gsm8k", "--local_dataset_path", "d", "--local_save_dir", "o"),
         ("'question'",), (lines("d/train.jsonl", {"q": 1}), lines("d/test.jsonl", {"q": 1}))),
    Case("paddock data", ("data", "gsm8k", "--local_dataset_path", "d", "--local_save_dir", "o"),
         ("train.jsonl.gz", "cannot be read"), (text("d/train.jsonl.gz", "x"), text("d/test.jsonl.gz", "x"))),
    Case("paddock data", ("data", "gsm8k", "--hdfs_dir", "hdfs://x"), ("--hdfs_dir",)),
    Case("paddock data", ("data", "full_hh_rlhf"), ("--split",)),
    Case("paddock data", ("data", "full_hh_rlhf", "--split", "dpo"), ("--split", "dpo")),
    Case("paddock data", ("data", "from-jsonl"), ("FILE",)),
    Case("paddock data", ("data", "from-jsonl", "nowhere.jsonl"), ("FILE=nowhere.jsonl", "does not exist")),
    Case("paddock data", ("data", "from-jsonl", "a.txt"), ("FILE=a.txt",), (text("a.txt", "x"),)),
    Case("paddock data", ("data", "from-jsonl", "a.jsonl"), ("FILE=a.jsonl", "no records"), (text("a.jsonl", ""),)),
    Case("paddock data", ("data", "from-jsonl", "a.jsonl"), ("a.jsonl row 0", "not JSON"), (text("a.jsonl", "{"),)),
    Case("paddock data", ("data", "from-jsonl", "a.jsonl"), ("a.jsonl row 0",), (text("a.jsonl", "[" * 10**6),)),
    Case("paddock data", ("data", "from-jsonl", "a.jsonl"), ("a.jsonl row 0", "JSON object"),
         (text("a.jsonl", "[1]"),)),
    Case("paddock data", ("data", "from-jsonl", "a.jsonl"), ("a.jsonl row 0", "'answer'"),
         (lines("a.jsonl", {"prompt": "x"}),)),
    Case("paddock data", ("data", "from-jsonl", "a.jsonl"), ("a.jsonl row 0", "'prompt'"),
         (lines("a.jsonl", {"answer": "x"}),)),
    Case("paddock data", ("data", "from-jsonl", "a.jsonl"), ("a.jsonl row 0",),
         (lines("a.jsonl", {"prompt": "\ud800", "answer": "x"}),)),
    Case("paddock data", ("data", "from-jsonl", "a.jsonl"), ("a.jsonl row 0",),
         (lines("a.jsonl", {"prompt": "x", "answer": "\ud800"}),)),
    Case("paddock data", ("data", "from-jsonl", "a.jsonl", "--test-share", "2"), ("--test-share=2.0",),
         (lines("a.jsonl", ANSWERED),)),
    Case("paddock data", ("data", "from-jsonl", "a.jsonl", "--test-share", "nan"), ("--test-share=nan",),
         (lines("a.jsonl", ANSWERED),)),
    Case("paddock data", ("data", "from-jsonl", "a.jsonl", "--test-share", "some"), ("--test-share", "some"),
         (lines("a.jsonl", ANSWERED),)),
    Case("paddock data", ("data", "from-jsonl", "a.jsonl", "--style", "magic"), ("--style", "magic"),
         (lines("a.jsonl", ANSWERED),)),
    Case("paddock data", ("data", "from-jsonl", "a.jsonl", "--test-file", "b.jsonl"), ("b.jsonl", "does not exist"),
         (lines("a.jsonl", ANSWERED),)),
    Case("paddock data", ("data", "from-jsonl", "a.jsonl", "--local_save_dir", "f"), ("cannot be written",),
         (lines("a.jsonl", ANSWERED), text("f", "x"))),
    Case("paddock data", ("data", "from-jsonl", "a.jsonl", "--local_save_dir", "d"), ("cannot be written",),
         (lines("a.jsonl", ANSWERED), empty_folder("d"), closed("d", 0o500))),
    Case("paddock data", ("data", "from-jsonl", "a.jsonl.gz"), ("a.jsonl.gz", "cannot be read"),
         (zipped("a.jsonl.gz", json.dumps(ANSWERED).encode()), truncated("a.jsonl.gz", 0.7))),
    Case("paddock data", ("data", "from-jsonl", "a.jsonl"), ("a.jsonl", "Permission denied"),
         (lines("a.jsonl", ANSWERED), closed("a.jsonl"))),
]  # fmt: skip

CASES = [*BROKEN, *COLUMNS, *LEARNT, *REWARDS, *PLUGINS, *PREPARED]

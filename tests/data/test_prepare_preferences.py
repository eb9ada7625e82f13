"""`paddock data full_hh_rlhf`: transcripts become turns, and rows for supervised, reward-model and RL training."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from byte_tokenizer import byte_tokenizer
from pyarrow import parquet

from paddock.config.schema import DataConfig
from paddock.data.dataset import MODEL, PromptDataset
from paddock.data.pairs import PairDataset
from paddock.data.prepare import main
from paddock.data.unscored import AnswerDataset

LONG = "\n\nHuman: Is tea good?\n\nAssistant: Yes.\n\nHuman: Which one?\n\nThe green?\n\nAssistant:"
TURNS = [
    {"role": "user", "content": "Is tea good?"},
    {"role": "assistant", "content": "Yes."},
    {"role": "user", "content": "Which one?\n\nThe green?"},
]


def record(prompt=LONG, chosen=" Green tea is.", rejected=" No.", **more):
    return {"prompt": prompt, "response": chosen, "chosen": chosen, "rejected": rejected, **more}


def prepare(tmp_path, kind, *records, name="full_hh_rlhf"):
    (tmp_path / "raw").mkdir(exist_ok=True)
    for split in ("train", "test"):
        (tmp_path / "raw" / f"{split}.jsonl").write_text("\n".join(json.dumps(each) for each in records))
    flags = ["--split", kind, "--local_dataset_path", str(tmp_path / "raw"), "--local_save_dir", str(tmp_path / "out")]
    return main(name, flags)


def test_a_folder_that_is_named_for_its_kind_gets_no_other_inside(tmp_path):
    """As recipes name it: ~/data/full_hh_rlhf/rl."""
    prepare(tmp_path, "rl", record())
    again = ["--split", "rl", "--local_dataset_path", str(tmp_path / "raw"), "--local_save_dir"]
    assert main("full_hh_rlhf", [*again, str(tmp_path / "out" / "rl")]) == 0
    assert sorted(entry.name for entry in (tmp_path / "out" / "rl").iterdir()) == ["test.parquet", "train.parquet"]


def rows(tmp_path, kind, split="train"):
    return parquet.read_table(tmp_path / "out" / kind / f"{split}.parquet").to_pylist()


def test_a_record_becomes_a_row_of_each_kind(tmp_path):
    for kind in ("sft", "rm", "rl"):
        assert prepare(tmp_path, kind, record()) == 0
    assert rows(tmp_path, "sft") == [{"prompt": TURNS, "response": "Green tea is."}]
    assert rows(tmp_path, "rm") == [{"prompt": TURNS, "chosen": "Green tea is.", "rejected": "No."}]
    assert rows(tmp_path, "rl", "test") == [
        {
            "data_source": "Dahoas/full-hh-rlhf",
            "prompt": TURNS,
            "ability": "alignment",
            "reward_model": {"style": "model", "ground_truth": "Green tea is."},
            "extra_info": {"split": "test", "index": 0},
        }
    ]


def test_each_kind_is_read_by_the_training_it_is_for(tmp_path):
    """All three see one conversation, in the tokenizer's own template."""
    for kind in ("sft", "rm", "rl"):
        prepare(tmp_path, kind, record())
    tokenizer = byte_tokenizer()

    def first(kind, reader):
        config = DataConfig(train_files=str(tmp_path / "out" / kind / "train.parquet"), seed=0)
        read[kind] = reader.train(config, tokenizer)
        return read[kind][0]

    read = {}
    learnt, pair, asked = first("sft", AnswerDataset), first("rm", PairDataset), first("rl", PromptDataset)
    assert learnt.tokens == pair.tokens == asked.tokens
    assert tokenizer.decode(learnt.ground_truth) == tokenizer.decode(pair.ground_truth.chosen) == "Green tea is.<|end|>"
    assert tokenizer.decode(pair.ground_truth.rejected) == "No.<|end|>"
    assert [style for _, style in read["rl"].scorers] == [MODEL]


def test_the_example_script_is_the_same_command(tmp_path):
    prepare(tmp_path, "rm", record())
    script = Path(__file__).parents[2] / "examples" / "data_preprocess" / "full_hh_rlhf.py"
    flags = ["--split", "rm", "--local_dataset_path", tmp_path / "raw", "--local_dir", tmp_path / "script"]
    done = subprocess.run([sys.executable, script, *flags], capture_output=True, text=True, cwd=script.parent)
    assert done.returncode == 0, done.stderr
    one, other = ((tmp_path / folder / "rm" / "train.parquet").read_bytes() for folder in ("out", "script"))
    assert one == other


@pytest.mark.parametrize(
    ("prompt", "turns"),
    [
        ("\n\nHuman: Hi\n\nAssistant:", [("user", "Hi")]),
        ("Human: Hi\n\nHuman: there\n\nAssistant: ", [("user", "Hi\n\nthere")]),
        ("\n\nHuman: I am a Human: am I?\n\nAssistant:", [("user", "I am a Human: am I?")]),
        ("What is tea?", [("user", "What is tea?")]),
        ("\n\nHuman: a\n\nAssistant: \n\nHuman: b\n\nAssistant:", [("user", "a\n\nb")]),
    ],
)
def test_transcripts_are_cut_at_their_speakers_alone(tmp_path, prompt, turns):
    prepare(tmp_path, "rl", record(prompt))
    assert [(turn["role"], turn["content"]) for turn in rows(tmp_path, "rl")[0]["prompt"]] == turns


def test_pairs_that_prefer_nothing_are_left_out_and_counted(tmp_path, capsys):
    assert prepare(tmp_path, "rm", record(), record(rejected=" Green tea is. "), record(chosen="")) == 0
    assert len(rows(tmp_path, "rm")) == 1
    out = capsys.readouterr().out
    assert "4 records say nothing for this use and were left out" in out
    assert f"paddock rm train data.train_files={tmp_path}/out/rm/train.parquet" in out


def test_the_next_command_is_that_of_the_kind(tmp_path, capsys):
    prepare(tmp_path, "rl", record())
    assert "Next: paddock train reward_model.enable=True data.train_files=" in capsys.readouterr().out
    prepare(tmp_path, "sft", record(), name="hh_rlhf")
    assert "Next: paddock sft data.train_files=" in capsys.readouterr().out


def test_a_transcript_in_which_nobody_asks_is_an_error_with_its_place(tmp_path, capsys):
    assert prepare(tmp_path, "rl", record(), record("\n\nHuman: a\n\nAssistant: b")) == 2
    assert "train.jsonl row 1, column 'prompt': does not end with a question" in capsys.readouterr().err


def test_the_kind_must_be_named(tmp_path, capsys):
    assert main("full_hh_rlhf", ["--local_dataset_path", str(tmp_path)]) == 2
    assert "--split" in capsys.readouterr().err

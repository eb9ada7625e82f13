"""Public data sets are recognised by the paths recipes give them."""

from __future__ import annotations

import pytest

from paddock.data.prepare import NAMES
from paddock.facts.datasets import TABLE, known_dataset


@pytest.mark.parametrize(
    ("path", "name", "rows"),
    [
        ("~/data/gsm8k/train.parquet", "gsm8k", 7473),
        ("~/data/rlhf/gsm8k/test.parquet", "gsm8k", 1319),
        ("$HOME/data/math/train.parquet", "math", 7500),
        ("$HOME/data/geo3k/test.parquet", "geo3k", 601),
        ("/mnt/data/dapo-math-17k.parquet", "dapo-math-17k", 1791700),
        ("/mnt/dapo-math-17k/train.parquet", "dapo-math-17k", 1791700),
        ("data/aime-2024.parquet", "aime-2024", 960),
        ("/home/a/data/full_hh_rlhf/rl/train.parquet", "full_hh_rlhf", 112052),
        ("$HOME/data/Eurus-2-RL-Data/validation.parquet", "Eurus-2-RL-Data", 2048),
        ("data/hellaswag/val.parquet", "hellaswag", 10042),
        ("deepscaler/train.json", "deepscaler", 40315),
        ("x/MATH500.parquet", "math-500", 500),
        ("~/data/gsm8k/train_first_half.parquet", "gsm8k", None),
        ("~/data/gsm8k.parquet", "gsm8k", None),
        ("~/data/hellaswag/test.parquet", "hellaswag", None),
    ],
)
def test_a_path_names_its_data_set_and_split(path, name, rows):
    known = known_dataset(path)
    assert known is not None
    assert (known.name, known.rows) == (name, rows)


@pytest.mark.parametrize(
    "path",
    [
        "train.parquet",
        "~/data/mine/train.parquet",
        "~/data/math/mine/train.parquet",
        "~/data/full_hh_rlhf/rm/train.parquet",
        "~/data/gsm8k_multiturn/train.parquet",
        "",
        "/",
    ],
)
def test_other_paths_name_none(path):
    assert known_dataset(path) is None


def test_the_prepare_command_writes_to_the_folder_of_the_path():
    def command(path: str) -> str | None:
        known = known_dataset(path)
        return known and known.prepare_command

    assert command("~/data/gsm8k/train.parquet") == "paddock data gsm8k --local_save_dir ~/data/gsm8k"
    assert command("/mnt/my data/math/test.parquet") == 'paddock data math --local_save_dir "/mnt/my data/math"'
    assert command("/mnt/gsm8k.parquet") == "paddock data gsm8k --local_save_dir ~/data/gsm8k"
    rl = "~/data/full_hh_rlhf/rl"
    assert command(f"{rl}/train.parquet") == f"paddock data full_hh_rlhf --split rl --local_save_dir {rl}"
    assert command("~/data/hellaswag/train.parquet") is None


def test_every_preparer_in_the_table_exists():
    assert {known.preparer.split()[0] for known in TABLE if known.preparer} == set(NAMES) - {"from-jsonl"}

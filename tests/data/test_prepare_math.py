r"""MATH: the last \boxed{...}, the folder layouts, the example files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from paddock.core.boxed import last_boxed
from paddock.data.prepare import main


def record(answer: str, **more: str) -> dict:
    return {
        "problem": f"Find {answer}.",
        "solution": rf"We see $\boxed{{{answer}}}$.",
        "level": "Level 2",
        "type": "Algebra",
        **more,
    }


def rows(folder: Path, split: str) -> list[dict]:
    return parquet.read_table(folder / f"{split}.parquet").to_pylist()


@pytest.mark.parametrize(
    ("solution", "truth"),
    [
        (r"so $\boxed{42}$.", "42"),
        (r"$\boxed{\frac{1}{\sqrt{2}}}$", r"\frac{1}{\sqrt{2}}"),
        (r"first $\boxed{1}$, then $\boxed{2}$", "2"),
        (r"$\boxed {3}$", "3"),
        (r"the answer is $\boxed 5$.", "5"),
        (r"\[x = \boxed 17\] as claimed", "17"),
        (r"$\boxed\frac{1}{2}$", r"\frac{1}{2}"),
        (r"so \fbox{7}", "7"),
        (r"\fbox{1} and \boxed{2} and \fbox{3}", "2"),
        (r"$\boxed{\{1, 2\}}$", r"\{1, 2\}"),
        (r"$\boxed{\left\{ x \right.}$ }", r"\left\{ x \right."),
        (r"$\boxed{a \\{b}}$", r"a \\{b}"),
        (r"no box at all", None),
        (r"$\boxed{1 + {2}$", None),
        (r"it ends in \boxed", None),
    ],
)
def test_the_ground_truth_is_what_the_last_box_holds(solution, truth):
    assert last_boxed(solution) == truth


BALANCED = st.recursive(
    st.text(alphabet="ab1+ ", max_size=5),
    lambda inner: st.lists(inner | inner.map(lambda text: f"{{{text}}}"), max_size=4).map("".join),
    max_leaves=10,
)


@given(content=BALANCED, before=st.text(max_size=20), after=st.text(alphabet="xyz{}. $", max_size=10))
def test_balanced_braces_inside_a_box_are_kept_whole(content, before, after):
    assert last_boxed(rf"{before} \boxed{{{content}}}{after}") == content


@given(st.text(alphabet="\\boxedf{} 5$\n", max_size=40))
def test_no_text_makes_the_search_fail(text):
    found = last_boxed(text)
    assert found is None or found in text


def test_a_math_record_becomes_the_documented_row(tmp_path):
    raw = tmp_path / "raw"
    raw.mkdir()
    (raw / "train.jsonl").write_text(json.dumps(record("3")))
    (raw / "test.json").write_text(json.dumps([record(r"\frac{1}{2}"), record("5", level="Level 5")]))
    assert main("math", ["--local_dataset_path", str(raw), "--local_save_dir", str(tmp_path / "out")]) == 0
    assert rows(tmp_path / "out", "train") == [
        {
            "data_source": "DigitalLearningGmbH/MATH-lighteval",
            "prompt": [
                {
                    "role": "user",
                    "content": r"Find 3. Let's think step by step and output the final answer within \boxed{}.",
                }
            ],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": "3"},
            "extra_info": {"split": "train", "index": 0},
            "level": "Level 2",
            "type": "Algebra",
        }
    ]
    for split in ("train", "test"):
        example = json.loads((tmp_path / "out" / f"{split}_example.json").read_text())
        assert example == rows(tmp_path / "out", split)[0]


def test_the_original_folders_are_read_subject_by_subject_in_number_order(tmp_path):
    for place in ("train/algebra/10", "train/algebra/2", "train/geometry/1", "test/algebra/1"):
        file = tmp_path / "MATH" / f"{place}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(record(place.replace("/", "-"))))
    argv = ["--local_dataset_path", str(tmp_path / "MATH"), "--local_save_dir", str(tmp_path / "out")]
    assert main("math", argv) == 0
    assert [row["reward_model"]["ground_truth"] for row in rows(tmp_path / "out", "train")] == [
        "train-algebra-2",
        "train-algebra-10",
        "train-geometry-1",
    ]
    assert [row["extra_info"]["index"] for row in rows(tmp_path / "out", "train")] == [0, 1, 2]


def test_a_solution_without_a_box_is_named_by_file_and_column(tmp_path, capsys):
    file = tmp_path / "MATH" / "train" / "algebra" / "1.json"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps({"problem": "2+2?", "solution": "It is 4."}))
    assert main("math", ["--local_dataset_path", str(tmp_path / "MATH"), "--local_save_dir", str(tmp_path)]) == 2
    assert f"{file}, column 'solution'" in capsys.readouterr().err

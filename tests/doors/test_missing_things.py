"""What the user named and is not there is the answer, whatever else the defaults of the guide would ask for."""

from __future__ import annotations

import pytest

from paddock.cli import main


@pytest.mark.parametrize(
    ("setting", "answer"),
    [
        ("data.train_files=/no/such.parquet", "data.train_files=/no/such.parquet: no such file"),
        ("actor_rollout_ref.model.path=/no/model", "actor_rollout_ref.model.path=/no/model: no such folder"),
    ],
)
def test_a_path_that_is_not_there_is_named_first(setting, answer, capsys):
    assert main(["train", setting, "trainer.n_gpus_per_node=8", "trainer.device=cpu"]) == 2
    assert capsys.readouterr().err.startswith(f"paddock: {answer}")


@pytest.mark.parametrize("there", [True, False])
def test_a_run_that_is_not_there_is_the_answer_of_eval_and_not_the_data_of_its_defaults(
    there, tmp_path, monkeypatch, capsys
):
    """`checkpoints/NAME` looks like a name of the hub, and is one of a run."""
    monkeypatch.chdir(tmp_path)
    if there:
        (tmp_path / "checkpoints").mkdir()
    assert main(["eval", "checkpoints/nowhere"]) == 2
    assert "actor_rollout_ref.model.path=checkpoints/nowhere: no such folder" in capsys.readouterr().err

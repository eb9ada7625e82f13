"""Mistakes in calls of the library are UserErrors, and what was trained is kept."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal

import pytest

import paddock
from paddock import UserError

ROWS = [{"prompt": f"{a}+1=", "answer": str(a + 1)} for a in range(8)]
SMALL = dict(model="builtin:tiny", data=ROWS, reward="exact_match", batch=4, n=2, response_length=4, logger=["file"])


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("wrong", [{"response_length": 0}, {"response_length": -1}, {"n": 0}, {"temperature": -1.0}])
def test_generate_refuses_what_is_no_number_of_tokens_or_responses(wrong):
    with paddock.Run(steps=1, **SMALL) as run, pytest.raises(UserError):
        run.generate("1+1=", **wrong)


def test_a_section_of_config_is_read_as_its_dotted_keys_are():
    run = paddock.Run(steps=1, config={"trainer": {"default_local_dir": "mine"}}, **SMALL)
    assert run.folder.name == "mine"
    for twice in (
        {"data": {"train_batch_size": 8}},
        {"algorithm.adv_estimator": "rloo"},
        {"data.train_files": "x.csv"},
    ):
        with pytest.raises(UserError, match="as well"):
            paddock.Run(steps=1, config=twice, **SMALL)


@pytest.mark.parametrize("how", ["break", "error"])
def test_steps_of_a_loop_that_was_left_are_kept(how):
    try:
        with paddock.Run(steps=4, folder="a", **SMALL) as run:
            for step in run:
                if step.number == 2:
                    if how == "break":
                        break
                    raise ValueError
    except ValueError:
        pass
    with paddock.Run(steps=4, folder="a", **SMALL) as run:
        assert run.train().trained == 2


def test_a_second_run_of_another_thread_is_not_told_to_kill_the_process():
    with paddock.Run(steps=1, folder="a", **SMALL) as first, ThreadPoolExecutor(1) as threads:
        first.open()
        with pytest.raises(UserError, match=r"run\.close") as refused:
            threads.submit(paddock.Run(steps=1, folder="a", **SMALL).open).result()
    assert "kill" not in refused.value.fix


@pytest.mark.parametrize("table", [{"prompt": ["1"] * 2, "answer": ["2", 3]}])
def test_a_table_that_arrow_refuses_is_the_callers_mistake(table):
    pandas = pytest.importorskip("pandas")
    with pytest.raises(UserError):
        paddock.Run(**SMALL | {"data": pandas.DataFrame(table)})


@pytest.mark.parametrize("wrong", [{"reward": 5}, {"reward": {"exact_match": "much"}}, {"tools": 5}, {"config": "a=b"}])
def test_arguments_of_a_wrong_type_are_the_callers_mistake(wrong):
    with pytest.raises(UserError):
        paddock.Run(**SMALL | wrong)


def test_decimals_are_answers_without_quotes_and_nan_is_none(tmp_path):
    import pyarrow as pa
    from pyarrow import parquet

    parquet.write_table(pa.table({"prompt": ["1"] * 4, "answer": [Decimal("2.50")] * 4}), tmp_path / "d.parquet")
    with paddock.Run(**SMALL | {"data": "d.parquet", "steps": 1}) as run:
        assert next(iter(run)).samples[0].ground_truth == "2.50"
    with (
        pytest.raises(UserError, match="there is no answer"),
        paddock.Run(**SMALL | {"data": [{"prompt": "1", "answer": float("nan")}] * 4, "steps": 1}) as run,
    ):
        run.train()


def test_calls_with_what_is_not_there_are_the_callers_mistake(tmp_path):
    with paddock.Run(steps=1, **SMALL) as run:
        for call in (lambda: run.score([]), lambda: run.plan("H10000"), lambda: run.export("model", "fp8")):
            with pytest.raises(UserError):
                call()
        assert len(run.generate(pytest.importorskip("numpy").array(["1+1=", "2+2="]))) == 2
    assert not (tmp_path / "model").exists()


def test_a_list_of_texts_is_told_how_rows_are_written():
    with pytest.raises(UserError, match="a list of texts is no list of rows") as error:
        paddock.Run(data=["1+1=", "1+2="], reward=lambda completion: 1.0)
    assert '{"prompt": "1+1="' in error.value.fix


def test_a_prompt_that_is_too_long_is_told_the_keyword_that_allows_it():
    with paddock.Run(steps=1, prompt_length=8, **SMALL) as run:
        for prompts, name in ((["1+1=", "1" * 12], "prompt 1"), ("1" * 12, "the prompt")):
            with pytest.raises(UserError, match=f"{name} has 12 tokens") as error:
                run.generate(prompts)
            assert error.value.fix == "Run(..., prompt_length=12)"

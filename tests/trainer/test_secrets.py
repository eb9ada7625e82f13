"""Secrets among the settings reach no file, page, logger or printed command of a run."""

from __future__ import annotations

import pytest
from test_loop import arguments

from paddock.cli import main
from paddock.config import tree
from paddock.config.schema import Config
from paddock.config.secrets import masked

SCORER = "def compute_score(data_source, solution_str, ground_truth, extra_info, **settings):\n    return 1.0\n"


@pytest.mark.parametrize(
    "setting",
    [{"api_key": "abc"}, {"OPENAI_API_KEY": "abc"}, {"x-api-key": "abc"}, {"headers": {"Authorization": "Bearer abc"}},
     {"client_secret": "abc"}, {"db": {"password": "abc"}}, {"token": "abc-abc-abc-abc"}, {"key": "abcabcabcabc1"},
     "http://me:abc@host:8000/v1", {"urls": ["https://abc@host"]}],
)  # fmt: skip
def test_a_secret_is_hidden_by_its_name_and_a_login_in_a_url(setting):
    assert "abc" not in str(masked(setting)) and "***" in str(masked(setting))


def test_settings_that_are_no_secrets_stay_as_they_are():
    for setting in (
        {"eos_token": "<|im_end|>", "max_tokens": 512},
        {"key": "answer"},
        {"api_key_env": "OPENAI_API_KEY"},
        "http://host/a@b",
        [1, None],
    ):
        assert masked(setting) == setting
    for key in tree.leaves():
        assert masked(tree.get(Config(), key), key) == tree.get(Config(), key)


def test_no_file_of_a_run_and_no_line_that_it_prints_holds_a_secret(tmp_path, capsys):
    (tmp_path / "scorer.py").write_text(SCORER)
    folder = tmp_path / "run"
    keys = [f"custom_reward_function.path={tmp_path}/scorer.py", "algorithm.adv_estimator=grpo",
            "custom_reward_function.reward_kwargs={api_key: sk-NOBODY, judge: 'http://me:sk-NOBODY@host/v1'}",
            "trainer.logger=[console,file]"]  # fmt: skip
    assert main(["train", *arguments(folder, *keys)]) == 0
    assert main(["plan", *arguments(folder, *keys)]) == 0
    said = "".join(capsys.readouterr())
    assert "sk-NOBODY" not in said and "api_key:'***'" in said
    held = {path.name for path in folder.rglob("*") if path.is_file() and b"sk-NOBODY" in path.read_bytes()}
    assert (folder / "report.html").is_file() and not held

"""verl's names for rewards: scorers by config, managers by name, and one call for a batch."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf

from paddock.errors import UserError
from paddock.rewards.rules import compute_score

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "compat"), str(ROOT / "tests/data")]
reward, managers = import_module("verl.trainer.ppo.reward"), import_module("verl.workers.reward_manager")
score = import_module("verl.utils.reward_score").default_compute_score
DataProto = import_module("verl.protocol").DataProto
byte_tokenizer = import_module("byte_tokenizer").byte_tokenizer

ANSWERS = ["#### 7", "#### 8", "I do not know"]


def proto(answers=ANSWERS, truths=("7", "7", "7"), source="openai/gsm8k", **objects):
    tokenizer = byte_tokenizer()
    tokens = [[*tokenizer.encode(answer), tokenizer.eos_token_id] for answer in answers]
    width = max(map(len, tokens))
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in tokens])
    responses = torch.tensor([row + [tokenizer.pad_token_id] * (width - len(row)) for row in tokens])
    return DataProto.from_dict(
        {
            "prompts": torch.zeros(len(tokens), 2, dtype=torch.long),
            "responses": responses,
            "attention_mask": torch.cat([torch.ones(len(tokens), 2, dtype=torch.long), mask], 1),
        },
        {
            "data_source": [source] * len(tokens),
            "reward_model": [{"style": "rule", "ground_truth": truth} for truth in truths],
            "extra_info": [{"index": i} for i in range(len(tokens))],
        }
        | objects,
    )


def on_last_token(values):
    """Each answer's value on its end-of-text."""
    mask = proto().batch["attention_mask"][:, 2:]
    found = torch.zeros(mask.shape)
    found[torch.arange(len(values)), mask.sum(-1) - 1] = torch.tensor(values)
    return found


@pytest.fixture
def scorer(tmp_path):
    """Writes a scorer that counts its calls."""

    def write(body: str) -> str:
        path, calls = tmp_path / "my_reward.py", tmp_path / "calls"
        path.write_text(
            "def grade(data_source, solution_str, ground_truth, extra_info, **kwargs):\n"
            f"    open({str(calls)!r}, 'a').write('x')\n    {body}\n"
        )
        return str(path)

    return write


def config(path, form="january", **kwargs):
    custom = {"custom_reward_function": {"path": path, "name": "grade", "reward_kwargs": kwargs}}
    node = {"data": {"reward_fn_key": "data_source"}, "reward_model": {"reward_manager": "naive"}}
    if form == "later":
        node = {"data": node["data"], "reward": {"reward_manager": {"name": "naive", "source": "register"}} | custom}
    node = OmegaConf.create(node if form == "later" else node | custom)
    OmegaConf.set_struct(node, True)
    return node


# Functions.


@pytest.mark.parametrize("form", ["january", "later"])
def test_a_custom_function_is_loaded_with_its_own_arguments(scorer, form):
    path = scorer("return {'score': len(solution_str) * kwargs['scale'], 'truth': ground_truth}")
    function = reward.get_custom_reward_fn(config(path, form, scale=2))
    assert function(data_source="s", solution_str="abc", ground_truth="t") == {"score": 6.0, "truth": "t"}
    assert function("s", "abc", "t", {}, scale=9)["score"] == 6.0, "the config's arguments win"


def test_without_a_path_there_is_no_custom_function():
    assert reward.get_custom_reward_fn(config(None)) is None and reward.get_custom_reward_fn({}) is None
    assert reward.get_custom_reward_fn(SimpleNamespace(custom_reward_function=None)) is None


def test_a_function_that_is_not_there_is_refused_when_it_is_asked_for(tmp_path, scorer):
    with pytest.raises(UserError, match="cannot be imported"):
        reward.get_custom_reward_fn(config(f"{tmp_path}/none.py"))
    node = config(scorer("return 1.0"))
    node.custom_reward_function.name = "grate"
    with pytest.raises(UserError, match="did you mean 'grade'"):
        reward.get_custom_reward_fn(node)


def test_default_scores_are_paddocks_rules():
    assert score("openai/gsm8k", "it is #### 7", "7") == 1.0
    assert score("paddock/addition", "64", "64", None) == compute_score("paddock/addition", "64", "64")
    found = score("math_dapo", "Answer: 7", "7", extra_info={}, sandbox_fusion_url=None)
    assert found["score"] == 1.0 and {"acc", "pred"} <= found.keys()
    with pytest.raises(NotImplementedError, match="no scorer is known"):
        score("nobody/knows", "7", "7")


# Managers.


def test_a_manager_scores_by_data_source_on_the_last_token():
    manager = reward.load_reward_manager(config(None), byte_tokenizer(), num_examine=0)
    tensor, extras = reward.compute_reward(proto(), manager)
    torch.testing.assert_close(tensor, on_last_token([1.0, 0.0, 0.0]))
    assert extras == {"score": [1.0, 0.0, 0.0]}
    assert torch.equal(manager(proto()), tensor)


def test_a_custom_function_scores_in_a_manager_once_a_row(scorer, tmp_path):
    path = scorer("return {'score': float(extra_info['index']), 'size': len(solution_str)}")
    manager = reward.load_reward_manager(config(path), byte_tokenizer())
    tensor, extras = reward.compute_reward(proto(), manager)
    torch.testing.assert_close(tensor, on_last_token([0.0, 1.0, 2.0]))
    assert extras["size"] == [6, 6, 13] and len((tmp_path / "calls").read_text()) == 3


def test_a_function_at_hand_scores_in_this_process():
    seen = []

    def mine(data_source, solution_str, ground_truth, extra_info):
        seen.append(solution_str)
        return {"score": float(solution_str.endswith(ground_truth)), "acc": 1}

    manager = managers.NaiveRewardManager(byte_tokenizer(), 1, compute_score=mine, reward_fn_key="kind")
    found = manager(proto(kind=["anything"] * 3), return_dict=True)
    torch.testing.assert_close(found["reward_tensor"], on_last_token([1.0, 0.0, 0.0]))
    assert found["reward_extra_info"] == {"score": [1.0, 0.0, 0.0], "acc": [1, 1, 1]} and seen == ANSWERS


def test_a_batch_manager_calls_the_function_once_with_lists(tmp_path):
    seen = []

    def mine(data_sources, solution_strs, ground_truths, extra_infos):
        seen.append((data_sources, solution_strs, ground_truths, [info["index"] for info in extra_infos]))
        return [float(text.endswith(truth)) for text, truth in zip(solution_strs, ground_truths, strict=True)]

    manager = managers.get_reward_manager_cls("batch")(byte_tokenizer(), 0, compute_score=mine)
    torch.testing.assert_close(manager(proto()), on_last_token([1.0, 0.0, 0.0]))
    assert seen == [(["openai/gsm8k"] * 3, ANSWERS, ["7"] * 3, [0, 1, 2])]
    path = tmp_path / "lists.py"
    path.write_text("def grade(data_sources, solution_strs, **more): return [len(data_sources)] * len(solution_strs)")
    node = config(str(path))
    node.reward_model.reward_manager = "batch"
    manager = reward.load_reward_manager(node, byte_tokenizer())
    torch.testing.assert_close(manager(proto()), on_last_token([3.0, 3.0, 3.0]))


def test_dapo_takes_from_long_responses():
    buffer = OmegaConf.create({"enable": True, "len": 10, "penalty_factor": 1.0, "log": True})
    node = config(None)
    node.reward_model.reward_manager = "dapo"
    manager = reward.load_reward_manager(node, byte_tokenizer(), 0, max_resp_len=20, overlong_buffer_cfg=buffer)
    tensor, extras = reward.compute_reward(proto(), manager)
    torch.testing.assert_close(tensor, on_last_token([1.0, 0.0, -0.4]))  # 14 tokens, 4 into a zone of 10
    assert extras["acc"] == [1.0, 0.0, 0.0] and extras["overlong"] == [False, False, True]
    with pytest.raises(UserError, match=r"overlong_buffer.len=10"):
        managers.DAPORewardManager(byte_tokenizer(), 0, overlong_buffer_cfg=buffer)


def test_scores_that_are_there_are_handed_on():
    data = proto(acc=[1, 0, 0])
    data.batch["rm_scores"], data.meta_info["reward_extra_keys"] = on_last_token([3.0, 2.0, 1.0]), ["acc"]
    tensor, extras = reward.compute_reward(data, managers.NaiveRewardManager(byte_tokenizer()))
    assert tensor is data.batch["rm_scores"] and list(extras["acc"]) == [1, 0, 0]
    assert reward.extract_reward(data)[0] is tensor


def test_a_manager_of_ones_own_is_found_by_its_name(monkeypatch):
    monkeypatch.setitem(managers.REWARD_MANAGER_REGISTRY, "mine", None)
    del managers.REWARD_MANAGER_REGISTRY["mine"]

    @managers.register("mine")
    class Mine:
        def __init__(self, tokenizer, num_examine, compute_score, reward_fn_key="data_source", bonus=0.0):
            self.compute_score, self.bonus = compute_score, bonus

        def __call__(self, data, return_dict=False):
            values = torch.full((len(data), 1), self.bonus + self.compute_score("openai/gsm8k", "#### 7", "7"))
            return {"reward_tensor": values} if return_dict else values

    node = config(None)
    node.reward_model.reward_manager = "mine"
    tensor, extras = reward.compute_reward(proto(), reward.load_reward_manager(node, None, 1, bonus=0.5))
    assert tensor.tolist() == [[1.5]] * 3 and extras == {}
    assert managers.get_reward_manager_cls("mine") is Mine
    node.reward_model.reward_manager = "their"
    with pytest.raises(UserError, match="no reward manager named 'their'"):
        reward.load_reward_manager(node, None)
    later = config(None, "later")
    later.reward.reward_manager.source = "importlib"
    with pytest.raises(UserError, match=r"reward_manager.source=importlib"):
        reward.load_reward_manager(later, None)


# One call.


@pytest.mark.parametrize("error", [ValueError("no number"), TypeError("unexpected keyword argument 'return_dict'")])
def test_trap_13_a_scorer_that_raises_is_seen_and_not_called_again(error):
    calls = []

    def reward_fn(data, return_dict=False):
        calls.append(return_dict)
        raise error

    with pytest.raises(type(error), match=str(error)):
        reward.compute_reward(proto(), reward_fn)
    assert calls == [True]


def test_trap_13_a_managers_scorer_that_raises_is_not_called_again(scorer, tmp_path):
    manager = reward.load_reward_manager(config(scorer("return 1 / 0")), byte_tokenizer())
    with pytest.raises(UserError, match="ZeroDivisionError"):
        reward.compute_reward(proto(answers=ANSWERS[:1], truths=["7"]), manager)
    assert (tmp_path / "calls").read_text() == "x"


def test_a_function_of_the_oldest_form_is_called_once_without_return_dict():
    calls = []
    tensor, extras = reward.compute_reward(proto(), lambda data: calls.append(data) or torch.ones(3, 1))
    assert tensor.shape == (3, 1) and extras == {} and len(calls) == 1


def test_the_ray_task_is_refused_by_name():
    for call in (reward.compute_reward_async, reward.compute_reward_async.remote):
        with pytest.raises(UserError, match=r"compute_reward_async is a Ray task[\s\S]*compute_reward\("):
            call(data=proto(), config={}, tokenizer=None)


def test_code_is_scored_in_the_local_sandbox():
    truth = '{"test_list": ["assert double(2) == 4"], "test_setup_code": ""}'
    from verl.utils.reward_score import default_compute_score

    score = default_compute_score("google-research-datasets/mbpp", "```python\ndef double(x): return 2 * x\n```", truth)
    assert score["score"] == 1.0

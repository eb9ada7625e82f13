"""Tools and interactions written for verl run: classes of YAML files, marked functions, users that answer."""

from __future__ import annotations

import json
import textwrap
from itertools import count
from pathlib import Path

import pytest
from chatty import TURNS, keys_of, metrics, save_chatty, talk, write_rows

from paddock.errors import UserError
from paddock.loading.load import load
from paddock.rollouts.episode import Episode
from paddock.trainer.reinforcement import train
from paddock.verl.tools import load_verl_tools

NUMBERS = count()
GSM8K = "verl.tools.gsm8k_tool.Gsm8kTool"
TRUTH = {"tools_kwargs": {"check": {"create_kwargs": {"ground_truth": "7"}}}, "need_tools_kwargs": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chatty(tmp_path_factory.mktemp("chatty"))


@pytest.fixture(scope="module")
def answering(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chatty(tmp_path_factory.mktemp("answering"), likely="#### 7")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_rows(tmp_path / "rows.jsonl", extra_info=TRUTH)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def module(folder: Path, text: str) -> str:
    name = f"tools_{next(NUMBERS)}"
    (folder / f"{name}.py").write_text(textwrap.dedent(text))
    return name


def entry(name: str, tool: str = "check", **config: object) -> dict:
    properties = {"answer": {"type": "string", "description": "a number"}}
    parameters = {"type": "object", "properties": properties, "required": ["answer"]}
    function = {"name": tool, "description": "Says whether an answer is right.", "parameters": parameters}
    schema = {"type": "function", "function": function}
    return {"class_name": name, "config": {"type": "native", **config}, "tool_schema": schema}


def tools(folder: Path, *entries: dict, turns: int = 3) -> list[str]:
    """Returns the keys of a run with the tools of a YAML file, which JSON is."""
    (folder / "tools.yaml").write_text(json.dumps({"tools": list(entries)}))
    more = f"{TURNS}.max_assistant_turns={turns}", f"{TURNS}.format=hermes", f"{TURNS}.enable=True"
    return [f"{TURNS}.tool_config_path={folder}/tools.yaml", *more]


def said(episode: Episode, role: str) -> list[str]:
    return [turn["content"] for turn in episode.extras["conversation"] if turn["role"] == role]


def called(episodes: list[Episode], times: int) -> list[Episode]:
    """Returns the episodes with so many calls, all in the first turns; there are some."""
    found = [one for one in episodes if one.extras["tool_call_counts"] == times]
    assert len(found) > 3
    return found


def test_a_class_of_a_yaml_file_is_called_with_the_rows_arguments_and_its_rewards_are_told_and_not_paid(model, folder):
    for one in called(talk(model, folder, *tools(folder, entry(GSM8K)), samples=4), 3):
        assert said(one, "tool") == ["Current parsed answer='7' reward=1.0"] * 3
        fields = one.extras["extra_fields"]
        assert fields["tool_rewards"] == [0.0, -0.05, -0.05], "the second answer is no better than the first"
        assert all(span.reward == 0.0 for span in one.spans)
        assert fields["rollout_reward_scores"] == {"check": 1.0, "user_turn_rewards": []}


def test_the_policy_is_told_the_schema_of_the_yaml_file(model, folder):
    template = "{{ tools[0].function.name }}{% for m in messages %}{{ m.content }}{% endfor %}<|assistant|>"
    write_rows(folder / "rows.jsonl", count=1, extra_info=TRUTH)
    own = tools(folder, entry(GSM8K), turns=1)
    (one,) = talk(model, folder, *own, f"data.apply_chat_template_kwargs.chat_template='{template}'", samples=1)
    from paddock.models.load import load_tokenizer

    assert load_tokenizer(str(model)).decode(one.prompt.tokens) == "check3+4=0?<|assistant|>"


def test_a_run_with_a_tool_trains_and_its_reward_function_is_told_what_tools_paid(model, folder):
    (folder / "mine.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    return len(extra_info['tool_rewards']) + 10 * extra_info['num_turns']\n"
    )
    own = tools(folder, entry(GSM8K), turns=1)
    assert train(load(keys_of(model, folder, *own, f"custom_reward_function.path={folder}/mine.py")).config).finished
    found = metrics(folder)
    assert found[0]["critic/score/max"] == 21.0 and found[0]["tool_call_counts/max"] == 1.0


OLDER = """
from verl.tools.base_tool import BaseTool

class Older(BaseTool):
    log = []
    def create(self, instance_id, truth="none"):
        self.log.append(f"create {truth}")
    def execute(self, instance_id, parameters, factor=1):
        return f"{parameters['answer']} of {self.log[0][7:]}", 0.5 * factor, {}
    def calc_reward(self, instance_id):
        return 2.0
    def release(self, instance_id, how="plain"):
        self.log.append(f"release {how}")
"""


def test_a_tool_with_functions_for_coroutines_runs_in_a_thread_and_is_released_at_the_end(model, folder):
    kwargs = {"create_kwargs": {"truth": "all"}, "execute_kwargs": {"factor": 2}, "release_kwargs": {"how": "well"}}
    write_rows(folder / "rows.jsonl", count=1, extra_info={"tools_kwargs": {"check": kwargs}})
    name = module(folder, OLDER)
    (one,) = called(talk(model, folder, *tools(folder, entry(f"{name}.Older"), turns=2), samples=8), 2)[:1]
    assert said(one, "tool") == ["7 of all"] * 2
    assert one.extras["extra_fields"]["tool_rewards"] == [1.0, 1.0]
    log = __import__(name).Older.log
    assert log.count("create all") == log.count("release well") >= 4 and len(log) == 2 * log.count("create all")


NEWER = """
import asyncio
from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse

class Newer(BaseTool):
    def get_openai_tool_schema(self):
        return OpenAIFunctionToolSchema.model_validate({"type": "function", "function": {
            "name": "check", "description": "", "parameters": {"type": "object", "properties": {}}}})
    async def create(self, instance_id=None, **kwargs):
        return "own id " + kwargs["create_kwargs"]["ground_truth"], ToolResponse()
    async def execute(self, instance_id, parameters, **kwargs):
        data = kwargs["agent_data"]
        data.extra_fields["calls"] = data.extra_fields.get("calls", 0) + 1
        await asyncio.sleep(0)
        return ToolResponse(text=f"{instance_id} {data.messages[0]['content']}"), None, {}
"""


def test_a_tool_of_newer_versions_finds_its_schema_create_kwargs_and_agent_data(model, folder):
    own = {"class_name": f"{module(folder, NEWER)}.Newer", "config": {"type": "native"}}
    (one,) = called(talk(model, folder, *tools(folder, own, turns=2), samples=4), 2)[:1]
    assert said(one, "tool") == ["own id 7 3+4=0?"] * 2 and one.extras["extra_fields"]["calls"] == 2
    assert one.extras["extra_fields"]["tool_rewards"] == []


FUNCTIONS = """
from verl.tools.function_tool import function_tool
from verl.tools.schemas import ToolResponse

@function_tool("check")
{how} verify(answer: str) -> str:
    \"\"\"Says whether an answer is right.

    Args:
        answer: a number
    \"\"\"
    return {returns}

@function_tool(schema={{"type": "function", "function": {{"name": "other", "description": "d", "parameters": {{}}}}}})
def untyped(x):
    return x
"""


@pytest.mark.parametrize(
    ("how", "returns", "text", "told"),
    [("def", "f'is {answer}'", "is 7", []), ("async def", "ToolResponse(text='fine'), 0.5", "fine", [0.5]),
     ("def", "({'right': True}, 0.25, {'seconds': 1})", '{"right": true}', [0.25])],
)  # fmt: skip
def test_marked_functions_are_tools_and_may_return_a_reward(model, folder, how, returns, text, told):
    path = folder / f"{module(folder, FUNCTIONS.format(how=how, returns=returns))}.py"
    own = [one for one in tools(folder, turns=1) if "tool_config_path" not in one]
    found = called(talk(model, folder, *own, f"{TURNS}.function_tool_path={path}", samples=4), 1)
    assert said(found[0], "tool") == [text] and found[0].extras["extra_fields"]["tool_rewards"] == told


def test_functions_and_classes_are_tools_together_unless_they_share_a_name(model, folder):
    path = folder / f"{module(folder, FUNCTIONS.format(how='def', returns='answer'))}.py"
    functions = f"{TURNS}.function_tool_path={path}"
    found = called(talk(model, folder, *tools(folder, entry(GSM8K, "judge")), functions), 3)
    assert said(found[0], "tool") == ["7", "7", "7"]
    with pytest.raises(UserError, match=r"tool_config_path=.*two tools are both called check"):
        talk(model, folder, *tools(folder, entry(GSM8K)), functions)


def test_a_row_may_choose_among_the_tools(model, folder):
    write_rows(folder / "rows.jsonl", extra_info={**TRUTH, "tool_selection": ["judge"]})
    own = tools(folder, entry(GSM8K), entry(GSM8K, "judge"), turns=1)
    found = called(talk(model, folder, *own, samples=4), 1)
    assert said(found[0], "tool")[0].startswith("error: there is no tool 'check'; there are judge")


def test_what_a_tool_raises_is_told_to_the_policy(model, folder):
    name = module(folder, OLDER + "\nclass Broken(Older):\n    def execute(self, *a, **b):\n        return 1 / 0\n")
    write_rows(folder / "rows.jsonl")
    found = called(talk(model, folder, *tools(folder, entry(f"{name}.Broken"), turns=1), samples=4), 1)
    assert said(found[0], "tool") == ["error: ZeroDivisionError: division by zero"]
    assert found[0].extras["failed_calls"] == 1


def test_programs_of_the_policy_run_in_the_sandbox_under_verls_name(folder):
    import asyncio

    (folder / "tools.yaml").write_text(
        json.dumps({"tools": [entry("verl.tools.sandbox_fusion_tools.SandboxFusionTool", "code_interpreter")]})
    )
    (tool,) = load_verl_tools(str(folder / "tools.yaml"))

    async def run(**parameters: object) -> str:
        instance, _ = await tool.own.create()
        response, reward, _ = await tool.own.execute(instance, parameters)
        await tool.own.release(instance)
        assert reward is None
        return response.text

    assert asyncio.run(run(code="print(3 + 4)")) == "7\n"
    assert "ZeroDivisionError" in asyncio.run(run(code="print(3 / 0)"))
    assert "not as cpp" in asyncio.run(run(code="int main() {}", language="cpp"))


IMAGE = (
    "\nclass Image(Newer):\n    async def execute(self, *a, **b):\n        return ToolResponse(image=[1]), 0.0, {}\n"
)
REFUSED = [
    ({"tools": [{**entry(GSM8K), "config": {"type": "mcp"}}]}, "is a tool of an MCP server, and none is started here"),
    ({"tools": [entry("verl.tools.search_tool.SearchTool")]}, r"Paddock has no verl.tools.search_tool"),
    ({"tools": [entry("verl.tools.gsm8k_tool.Gsm8kTol")]}, "no class 'Gsm8kTol'"),
    ({"tools": [entry("Gsm8kTool")]}, r"is no package.module.Class"),
    ({"tools": [{"class_name": GSM8K}]}, "cannot be made: ValueError: it has no tool_schema"),
    (
        {"tools": [{**entry(GSM8K), "tool_schema": {"type": "function"}}]},
        "tool_schema cannot be made: .* needs 'function'",
    ),
    ({"tools": []}, "holds no list 'tools'"),
    ({"tools": [{"config": {}}]}, "entry 0 has no 'class_name'"),
]


@pytest.mark.parametrize(("content", "why"), REFUSED)
def test_a_file_of_tools_that_cannot_serve_is_refused_by_name(model, folder, content, why):
    keys = tools(folder, entry(GSM8K))
    (folder / "tools.yaml").write_text(json.dumps(content))
    with pytest.raises(UserError, match=why) as caught:
        talk(model, folder, *keys)
    assert caught.value.key == f"{TURNS}.tool_config_path" and caught.value.fix


def test_a_tool_that_returns_an_image_is_refused_by_name(model, folder):
    own = {"class_name": f"{module(folder, NEWER + IMAGE)}.Image", "config": {"type": "native"}}
    with pytest.raises(UserError, match="the tool check returned an image or a video"):
        talk(model, folder, *tools(folder, own))


def interaction(folder: Path, *entries: dict) -> list[str]:
    (folder / "interactions.yaml").write_text(json.dumps({"interaction": list(entries)}))
    more = f"{TURNS}.max_assistant_turns=3", f"{TURNS}.enable=True"
    return [f"{TURNS}.interaction_config_path={folder}/interactions.yaml", *more]


USER = {"name": "gsm8k", "class_name": "verl.interactions.gsm8k_interaction.Gsm8kInteraction", "config": {}}
ASKED = {"interaction_kwargs": {"name": "gsm8k", "query": "3+4?", "ground_truth": "7"}}


def test_an_interaction_answers_turns_and_its_scores_are_told(answering, folder):
    write_rows(folder / "rows.jsonl", extra_info=ASKED)
    found = talk(answering, folder, *interaction(folder, USER), samples=8)
    wrong = [one for one in found if one.extras["extra_fields"]["turn_scores"] == [0.0, 1.0]]
    assert wrong and wrong[0].done
    assert said(wrong[0], "assistant") == ["7", "#### 7"] and "incorrect" in said(wrong[0], "user")[0]
    assert all(span.reward == 0.0 for span in wrong[0].spans)
    right = [one for one in found if one.extras["extra_fields"]["turn_scores"] == [1.0]]
    assert right and right[0].extras["num_turns"] == 2 and len(right[0].spans) == 1


def test_an_interaction_answers_what_calls_no_tool(model, folder):
    write_rows(folder / "rows.jsonl", extra_info={**TRUTH, **ASKED})
    own = [*tools(folder, entry(GSM8K)), *interaction(folder, USER)]
    roles = {tuple(turn["role"] for turn in one.extras["conversation"]) for one in talk(model, folder, *own, samples=8)}
    assert ("assistant", "tool", "assistant", "user", "assistant", "tool") in roles


def test_a_run_with_an_interaction_trains(answering, folder):
    write_rows(folder / "rows.jsonl", extra_info=ASKED)
    assert train(load(keys_of(answering, folder, *interaction(folder, USER))).config).finished
    assert metrics(folder)[0]["num_turns/max"] > 2.0


def test_a_row_without_the_name_of_an_interaction_is_refused_by_name(answering, folder):
    own = interaction(folder, USER)
    with pytest.raises(UserError, match=r"row 0 of data_source .* has the interaction None(.|\n)*gsm8k") as caught:
        talk(answering, folder, *own)
    assert caught.value.key == f"{TURNS}.interaction_config_path"
    with pytest.raises(UserError, match="two interactions are called 'gsm8k'"):
        talk(answering, folder, *interaction(folder, USER, {**USER, "name": None}))

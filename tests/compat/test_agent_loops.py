"""Agent loops written for verl run: what they return is what was drawn, and what cannot be is refused by name."""

from __future__ import annotations

import sys
import textwrap
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from chatty import ROLLOUT, TURNS, keys_of, metrics, save_chatty, talk, write_rows
from tiny_models import tiny_model

from paddock.engines.rollout.embedded.engine import EmbeddedEngine
from paddock.engines.rollout.hf import HFEngine
from paddock.errors import UserError
from paddock.loading.load import load
from paddock.rollouts.episode import Episode
from paddock.trainer.reinforcement import train

NUMBERS = count()
IMPORTS = """
import asyncio
from typing import Any
from uuid import uuid4
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput, register
from verl.experimental.agent_loop.tool_agent_loop import AgentData, AgentState, ToolAgentLoop
from verl.utils.profiler import simple_timer
from verl.utils.rollout_trace import rollout_trace_op
"""
TWO_TURNS = """
class Loop(AgentLoopBase):
    @rollout_trace_op
    async def run(self, sampling_params: dict[str, Any], **kwargs) -> AgentLoopOutput:
        prompt_ids = await self.apply_chat_template(list(kwargs["raw_prompt"]))
        whole, mask, metrics, request_id = list(prompt_ids), [], {}, uuid4().hex
        for turn in range(2):
            with simple_timer("generate_sequences", metrics):
                output = await self.server_manager.generate(
                    request_id=request_id, prompt_ids=whole, sampling_params=sampling_params, image_data=None)
            whole += output.token_ids
            mask += [1] * len(output.token_ids)
            if turn == 0:
                said = await self.apply_chat_template([{"role": "user", "content": "again"}], remove_system_prompt=True)
                whole += said
                mask += [0] * len(said)
        last = self.tokenizer.decode(output.token_ids, skip_special_tokens=True)
        size = self.config.actor_rollout_ref.rollout.response_length
        return AgentLoopOutput(
            prompt_ids=prompt_ids, response_ids=whole[len(prompt_ids):][:size], response_mask=mask[:size],
            reward_score=float(last == "7"), num_turns=4, metrics=AgentLoopMetrics(**metrics),
            extra_fields={"last": last})
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chatty(tmp_path_factory.mktemp("chatty"))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_rows(tmp_path / "rows.jsonl")
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def written(folder: Path, text: str) -> str:
    """Writes a module that has a name of its own; returns the name."""
    name = f"plugin_{next(NUMBERS)}"
    (folder / f"{name}.py").write_text(IMPORTS + textwrap.dedent(text))
    return name


def loop(folder: Path, text: str, more: str = "") -> list[str]:
    """Returns the keys of a run whose rows are answered by the class `Loop` of this text."""
    (folder / "loops.yaml").write_text(f"- name: mine\n  _target_: {written(folder, text)}.Loop\n{more}")
    return [f"{ROLLOUT}.agent.default_agent_loop=mine", f"{ROLLOUT}.agent.agent_loop_config_path={folder}/loops.yaml"]


def body(lines: str) -> str:
    """Returns a loop that has drawn a turn `first` behind `prompt`, and goes on with these lines."""
    return f"""
class Loop(AgentLoopBase):
    def output(self, prompt, ids, mask=None, **more):
        return AgentLoopOutput(prompt_ids=prompt, response_ids=ids, response_mask=mask or [1] * len(ids), metrics={{}}, **more)
    async def run(self, sampling_params, **kwargs):
        generate = self.server_manager.generate
        prompt = await self.apply_chat_template(kwargs["raw_prompt"])
        first = (await generate(request_id="a", prompt_ids=prompt, sampling_params=sampling_params)).token_ids
{textwrap.indent(textwrap.dedent(lines), " " * 8)}
"""  # noqa: E501


def turns(episode: Episode) -> list[bool]:
    return [span.log_probs is not None for span in episode.spans]


def test_a_loop_of_two_turns_trains_on_the_very_tokens_that_were_drawn(model, folder):
    write_rows(folder / "rows.jsonl", data_source="unheard/of")  # the loop scores: no rule is asked
    assert train(load(keys_of(model, folder, *loop(folder, TWO_TURNS))).config).finished
    found = metrics(folder)
    assert [one["num_turns/mean"] for one in found] == [4.0, 4.0]
    assert all(one["training/rollout_probs_diff_max"] < 1e-5 for one in found)
    assert found[0]["critic/score/max"] == 1.0 and found[0]["critic/score/min"] == 0.0
    assert found[0]["response_length/mean"] == 4.0 and found[0]["response_length_with_environment/mean"] > 8.0


def test_a_loops_output_becomes_spans_with_the_score_at_the_last_one(model, folder):
    for one in talk(model, folder, *loop(folder, TWO_TURNS), samples=8):
        assert turns(one) == [True, False, True] and one.done and one.extras["ended"] == "done"
        assert one.spans[2].reward == one.extras["reward_score"] == float(one.extras["extra_fields"]["last"] == "7")
        assert [span.version for span in one.spans] == [7, -1, 7] and one.spans[0].reward == 0.0
        assert [turn["role"] for turn in one.extras["conversation"]] == ["assistant", "user", "assistant"]


def test_engines_that_keep_a_conversation_draw_what_others_draw(model, folder):
    own = loop(folder, TWO_TURNS)
    kept = talk(model, folder, *own)
    assert kept == talk(model, folder, *own, f"{ROLLOUT}.deterministic=True")
    plain, few = talk(model, folder, *own, engine=HFEngine), talk(model, folder, *own, slots=3)
    for others in (plain, few):
        assert [[span.tokens for span in one.spans] for one in others] == [
            [span.tokens for span in one.spans] for one in kept
        ]


@pytest.mark.parametrize("said", [1, 20])
@pytest.mark.parametrize("deterministic", [True, False])
def test_turns_that_go_on_beyond_the_response_take_nothing_of_other_episodes(folder, said, deterministic):
    """The loop cuts its response, as verl's do: the last turn may end behind it. Row 3 has much to hear."""
    attentive = save_chatty(folder / "attentive")
    torch.manual_seed(0)
    other = tiny_model("llama", vocab_size=272, eos_token_id=1, pad_token_id=0)
    with torch.no_grad():
        for weight in other.parameters():
            weight.mul_(12 if weight.ndim == 2 else 1)
    other.save_pretrained(attentive)
    own = loop(
        folder,
        f"""
class Loop(AgentLoopBase):
    async def run(self, sampling_params, **kwargs):
        generate = self.server_manager.generate
        prompt = await self.apply_chat_template(kwargs["raw_prompt"])
        size = self.config.actor_rollout_ref.rollout.response_length
        short = dict(sampling_params, max_tokens=6)
        ids = list((await generate(request_id="a", prompt_ids=prompt, sampling_params=short)).token_ids)
        mask, heard = [1] * len(ids), [66] * ({said} if kwargs["index"] == 3 else 1)
        second = await generate(request_id="a", prompt_ids=prompt + ids + heard, sampling_params=sampling_params)
        ids, mask = ids + heard + second.token_ids, mask + [0] * len(heard) + [1] * len(second.token_ids)
        return AgentLoopOutput(prompt_ids=prompt, response_ids=ids[:size], response_mask=mask[:size], metrics={{}})
""",
    )
    keys = *own, "data.max_response_length=32", f"{ROLLOUT}.deterministic={deterministic}"
    kept, plain = (talk(attentive, folder, *keys, length=32, engine=kind) for kind in (EmbeddedEngine, HFEngine))
    for one, same in zip(kept, plain, strict=True):
        assert [span.tokens for span in one.spans] == [span.tokens for span in same.spans]


def test_a_prompt_of_a_later_turn_may_be_longer_than_all_first_ones(model, folder):
    own = loop(folder, body("""
        other = (prompt * 10)[:100]
        second = (await generate(request_id="b", prompt_ids=other, sampling_params=sampling_params)).token_ids
        return self.output(other, second)
    """))  # fmt: skip
    write_rows(folder / "rows.jsonl", count=1)
    engine = partial(EmbeddedEngine, max_model_len=128 + 8)
    keys = "data.max_response_length=8", f"{ROLLOUT}.deterministic=True"
    (found,) = talk(model, folder, *own, *keys, samples=1, length=8, engine=engine)
    assert len(found.prompt.tokens) == 100


def test_a_rows_agent_name_picks_a_loop_that_a_module_registered(model, folder):
    module = written(folder, TWO_TURNS.replace("class Loop", '@register("mine")\nclass Loop'))
    write_rows(folder / "rows.jsonl", agent_name=lambda index: "mine" if index % 2 else "single_turn_agent")
    found = talk(model, folder, f"actor_rollout_ref.model.external_lib={module}", samples=1)
    assert [turns(one) for one in found] == [[True], [True, False, True]] * 2


def test_turns_that_do_not_go_on_from_another_are_drawn_anew_and_each_by_itself(model, folder):
    own = loop(folder, body("""
        others = [(await generate(request_id="a", prompt_ids=prompt, sampling_params=sampling_params)).token_ids
                  for _ in range(3)]
        others += await asyncio.gather(*(generate(request_id="b", prompt_ids=prompt, sampling_params={}) for _ in "xy"))
        return self.output(prompt, others[1], extra_fields={"several": len({*map(tuple, [first, *others])})})
    """))  # fmt: skip
    found = talk(model, folder, *own, samples=8)
    assert all(turns(one) == [True] for one in found)
    assert {one.extras["extra_fields"]["several"] for one in found} == {1, 2}, "equal draws would always be one"


def test_a_turn_that_was_cut_is_continued_and_one_that_the_loop_cut_is_not_whole(model, folder):
    own = loop(folder, body("""
        short = (await generate(request_id="a", prompt_ids=prompt, sampling_params={"max_tokens": 1})).token_ids
        rest = (await generate(request_id="a", prompt_ids=prompt + short, sampling_params={})).token_ids
        again = (await generate(request_id="a", prompt_ids=prompt + short, sampling_params={})).token_ids
        assert len(short) == 1 and rest == again
        last = kwargs["index"] % 2 == 0
        return self.output(prompt, short + rest if last else short)
    """))  # fmt: skip
    found = talk(model, folder, *own, samples=1)
    assert [one.extras["ended"] for one in found] == ["done", "length"] * 2
    assert [one.done for one in found] == [True, False] * 2


def test_what_a_loop_masks_out_is_not_trained_on(model, folder):
    own = loop(folder, body("return self.output(prompt, first + [65], [0] + [1] * (len(first) - 1) + [0])"))
    assert all(turns(one) == [False, True, False] for one in talk(model, folder, *own))


def test_no_room_for_a_turn_is_an_empty_turn(model, folder):
    own = loop(folder, body("""
        turn = await generate(request_id="a", prompt_ids=prompt + [65] * 300, sampling_params=sampling_params)
        assert turn.token_ids == [] and turn.log_probs == []
        return self.output(prompt, first)
    """))  # fmt: skip
    assert all(turns(one) == [True] for one in talk(model, folder, *own))


def test_a_loop_that_waits_too_long_keeps_what_it_drew(model, folder):
    own = loop(folder, body("await asyncio.sleep(30)"))
    for one in talk(model, folder, *own, f"{TURNS}.tool_timeout=1", samples=1):
        assert turns(one) == [True] and one.extras["ended"] == "timeout" and not one.done
    with pytest.raises(UserError, match=r"took longer than 1 s before it asked for a turn"):
        text = "class Loop(AgentLoopBase):\n    async def run(self, *args, **kwargs): await asyncio.sleep(30)"
        talk(model, folder, *loop(folder, text), f"{TURNS}.tool_timeout=1", samples=1)


OLD = """
class Loop(AgentLoopBase):
    @classmethod
    def init_class(cls, config, tokenizer, **kwargs):
        if cls._class_initialized:
            return
        cls._class_initialized, cls.greeting = True, kwargs["greeting"]
    async def run(self, messages, sampling_params):
        prompt_ids = await self.loop.run_in_executor(None, lambda: self.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True))
        response_ids = await self.server_manager.generate(
            request_id=uuid4().hex, prompt_ids=prompt_ids, sampling_params=sampling_params)
        assert self.greeting == "hello"
        prompt_ids += response_ids
        return AgentLoopOutput(prompt_ids=prompt_ids[: -len(response_ids)], response_ids=response_ids,
                               response_mask=[1] * len(response_ids), num_turns=2, metrics={})
"""


def test_a_loop_in_the_form_of_verl_0_5_runs(model, folder):
    assert all(turns(one) == [True] for one in talk(model, folder, *loop(folder, OLD, "  greeting: hello\n")))


TOOL_LOOP = """
class Loop(ToolAgentLoop):
    async def _handle_generating_state(self, agent_data: AgentData, sampling_params, ignore_termination=False):
        state = await super()._handle_generating_state(agent_data, sampling_params)
        agent_data.extra_fields["states"] = [*agent_data.extra_fields.get("states", []), state.value]
        return state
"""
TOOLS = """
tools:
  - class_name: verl.tools.gsm8k_tool.Gsm8kTool
    config: {type: native}
    tool_schema:
      type: function
      function:
        name: check
        description: Says whether an answer is right.
        parameters: {type: object, properties: {answer: {type: string, description: a number}}, required: [answer]}
"""


def test_a_loop_that_changes_a_state_of_verls_own_runs_with_tools(model, folder):
    (folder / "tools.yaml").write_text(TOOLS)
    write_rows(folder / "rows.jsonl", extra_info={"tools_kwargs": {"check": {"create_kwargs": {"ground_truth": "7"}}}})
    more = f"{TURNS}.tool_config_path={folder}/tools.yaml", f"{TURNS}.max_assistant_turns=2", f"{TURNS}.format=hermes"
    found = talk(model, folder, *loop(folder, TOOL_LOOP), *more, samples=4)
    called = [one for one in found if len(one.spans) == 3]
    assert len(called) > 8
    for one in called:
        fields = one.extras["extra_fields"]
        assert "answer='7' reward=1.0" in one.extras["conversation"][1]["content"]
        assert fields["states"] == ["processing_tools", "terminated"] and fields["tool_rewards"] == [0.0]
        assert one.extras["num_turns"] == fields["num_turns"] == 4 and one.extras["reward_score"] is None


def test_reward_functions_are_told_what_the_loop_says(model, folder):
    own = loop(folder, body("return self.output(prompt, first, extra_fields={'tool_rewards': [0.25]}, num_turns=6)"))
    (folder / "mine.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    return sum(extra_info['tool_rewards']) + extra_info['num_turns']\n"
    )
    keys = keys_of(model, folder, *own, f"custom_reward_function.path={folder}/mine.py")
    assert train(load(keys).config).finished
    assert metrics(folder)[0]["critic/score/mean"] == 6.25


REFUSED: list[tuple[str, str]] = [
    ("return self.output(prompt, [*first[:-1], 70])", r"1 for 1 of 2 tokens that generate did not draw .* token 1 "),
    ("return self.output(prompt[1:], first)", r"2 of 2 tokens that generate did not draw there"),
    ("return self.output(prompt, self.tokenizer.encode(self.tokenizer.decode(first)[1:]))", "did not draw there"),
    ("await generate(prompt_ids=prompt, sampling_params={**sampling_params, 'temperature': 0.5})",
     r"temperature=0.5, and all turns of a step are drawn alike.*\n.*actor_rollout_ref.rollout.temperature sets it"),
    ("await generate(prompt_ids=prompt, sampling_params={'stop': ['</code>']})", r"stop=\['</code>'\]"),
    ("await generate(prompt_ids=prompt, sampling_params={'stop_token_ids': [70]})", r"stop_token_ids=\[70\]"),
    ("await generate(prompt_ids=prompt, sampling_params={'repetition_penalty': 1.1})", "repetition_penalty=1.1"),
    ("await generate(prompt_ids=prompt, sampling_params={'guided_json': '{}'})", "guided_json"),
    ("await generate(prompt_ids=prompt, sampling_params={}, image_data=['pixels'])", "image_data, and agent loops run"),
    ("""try:
    await generate(prompt_ids=[], sampling_params={})
except Exception:
    return self.output(prompt, first)""", "generate is given no tokens"),
    ("return self.output(prompt, first, [1])", "2 response_ids and 1 entries of response_mask"),
    ("return self.output(prompt, first + [65] * 200)", "202 response_ids, more than data.max_response_length=160"),
    ("return self.output(prompt * 20, first)", "prompt_ids, more than data.max_prompt_length=128"),
    ("return [self.output(prompt, first)] * 2", "returned 2 outputs"),
    ("return None", "returned a NoneType"),
    ("return self.output(prompt, first, reward_score=float('nan'))", "the loop pays nan"),
    ("return 1 / 0", r"raised ZeroDivisionError: division by zero \(plugin_\d+.py line \d+\)"),
    ("raise asyncio.CancelledError", "was cancelled"),
]  # fmt: skip


@pytest.mark.parametrize(("lines", "said"), REFUSED)
def test_what_a_loop_may_not_do_is_refused_by_name(model, folder, lines, said):
    with pytest.raises(UserError, match=said) as caught:
        talk(model, folder, *loop(folder, body(lines)))
    assert caught.value.key == f"{ROLLOUT}.agent.default_agent_loop" and caught.value.value == "mine"
    assert caught.value.fix
    assert "rows.jsonl row" in caught.value.reason


YAML: list[tuple[Any, str]] = [
    ("- name: mine\n", "entry 0 has no '_target_'"),
    ("- _target_: somewhere.Loop\n", "somewhere.Loop has no name"),
    ("- name: mine\n  _target_: nowhere.Loop\n", "nowhere.Loop cannot be imported: ModuleNotFoundError"),
    ("- name: mine\n  _target_: verl.experimental.agent_loop.agent_loop.Lop\n", "no class 'Lop'"),
    ("name: mine\n", "holds no list"),
    ("- name: [\n", "cannot be read"),
]


@pytest.mark.parametrize(("text", "said"), YAML)
def test_a_file_of_loops_that_cannot_be_read_is_refused_by_name(model, folder, text, said):
    keys = loop(folder, TWO_TURNS)
    (folder / "loops.yaml").write_text(text)
    with pytest.raises(UserError, match=said) as caught:
        talk(model, folder, *keys)
    assert caught.value.key == f"{ROLLOUT}.agent.agent_loop_config_path" and caught.value.fix


def test_a_loop_that_nobody_has_is_refused_with_those_that_are_there(model, folder):
    with pytest.raises(UserError, match=r"default_agent_loop=mime: there is no such agent loop(.|\n)*'mine'"):
        talk(model, folder, *loop(folder, TWO_TURNS)[1:], f"{ROLLOUT}.agent.default_agent_loop=mime")


def test_names_of_verl_are_there_without_pydantic_and_ray(monkeypatch):
    for module in ("pydantic", "ray"):
        monkeypatch.setitem(sys.modules, module, None)
    for name in [name for name in sys.modules if name.split(".")[0] == "verl"]:
        monkeypatch.delitem(sys.modules, name)
    from verl.experimental.agent_loop import AgentLoopBase, AgentLoopManager, ToolAgentLoop  # type: ignore
    from verl.experimental.agent_loop.agent_loop import AgentLoopOutput, AsyncLLMServerManager  # type: ignore

    assert issubclass(ToolAgentLoop, AgentLoopBase) and AsyncLLMServerManager
    output = AgentLoopOutput(prompt_ids=[1], response_ids=[2], response_mask=[1], metrics={"tool_calls": 2.0})
    assert output.metrics.tool_calls == 2.0 and output.model_dump(exclude_unset=True)["prompt_ids"] == [1]
    with pytest.raises(ValueError, match="needs 'metrics'"):
        AgentLoopOutput(prompt_ids=[1], response_ids=[2], response_mask=[1])
    with pytest.raises(UserError, match="AgentLoopManager"):
        AgentLoopManager()

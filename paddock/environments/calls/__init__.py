"""Tool calls in the formats that model families write: read from a turn of the policy, and written for data.

Nothing that a policy writes raises: a call that cannot be read becomes a `Malformed` whose reason helps to mend it.
"""

from __future__ import annotations

from typing import Any

from paddock.core.registry import suggest
from paddock.environments.calls import json_like, python_like, xml_like
from paddock.environments.calls.format import Format, Objects, call_of, json_value
from paddock.environments.calls.gemma import FUNCTION_GEMMA, GEMMA_4
from paddock.errors import UserError

__all__ = ["FORMATS", "OTHER_NAMES", "Format", "call_of", "format_of", "json_value"]

KEY = "actor_rollout_ref.rollout.multi_turn.format"


def _format(name: str, grammar: Any, *marks: str, **more: Any) -> Format:
    """Returns the format of a grammar; `more` are fields that do not follow from it."""
    around = grammar.opening, grammar.closing
    more = {"read": grammar.read, "around": around, **more}
    return Format(name, render=grammar.render, marks=marks, **more)


FORMATS: dict[str, Format] = {each.name: each for each in [
    Format("gpt_oss", json_like.read_harmony, json_like.render_harmony, ("<|channel|>", "functions."),
           content="<|channel|>final<|message|>"),
    _format("seed_oss", xml_like.SEED, "<seed:tool_call>", thinking=("<seed:think>", "</seed:think>")),
    Format("qwen3_coder", xml_like.read_coder, xml_like.render_coder, ("<function=",)),
    Format("glm45", xml_like.read_glm, xml_like.render_glm, ("<arg_key>",)),
    _format("minimax_m2", xml_like.MINIMAX_M2, "<minimax:tool_call>"),
    _format("step3", xml_like.STEP3, "<steptml:"),
    _format("deepseek_v32", xml_like.DEEPSEEK_32, "｜DSML｜", "function_calls>"),
    _format("deepseek_v4", xml_like.DEEPSEEK_4, "｜DSML｜", "tool_calls>"),
    Format("deepseek_v3", json_like.read_deepseek, json_like.render_deepseek, ("tool▁call▁begin", "```json"),
           around=json_like.DEEPSEEK_CALLS),
    Format("deepseek_v31", json_like.read_deepseek_31, json_like.render_deepseek_31, ("tool▁call▁begin",),
           around=json_like.DEEPSEEK_CALLS),
    Format("kimi_k2", json_like.read_kimi, json_like.render_kimi, ("<|tool_calls_section_begin|>",),
           around=json_like.KIMI_CALLS),
    _format("mistral", json_like.MISTRAL, "[TOOL_CALLS]", read=json_like.read_mistral),
    _format("cohere_command3", json_like.COHERE, "<|START_ACTION|>",
            thinking=("<|START_THINKING|>", "<|END_THINKING|>")),
    Format("command_r", json_like.read_command_r, json_like.render_command_r, ("<|START_OF_TURN_TOKEN|>", "Action:"),
           around=("Action:", "")),
    _format("nemotron_json", json_like.NEMOTRON, "<TOOLCALL>"),
    _format("internlm", json_like.INTERNLM, "<|plugin|>", read=json_like.read_internlm,
            around=("<|action_start|>", "<|action_end|>")),
    _format("minimax_m1", json_like.MINIMAX_M1, "<tool_calls>", "<beginning_of_sentence>"),
    _format("hunyuan_a13b", json_like.HUNYUAN, "<tool_calls>"),
    _format("functiongemma", FUNCTION_GEMMA, "<start_function_call>"),
    _format("gemma4", GEMMA_4, "<|tool_call>call:", thinking=("<|channel>", "<channel|>")),
    _format("phi4", json_like.PHI, "<|tool|>", "<|/tool|>", read=json_like.read_phi),
    _format("granite", json_like.GRANITE, "<|tool_call|>", read=json_like.read_granite),
    _format("olmo3", python_like.OLMO, "<function_calls>"),
    _format("lfm2", python_like.LFM, "List of tools: ", thought="thinking"),
    Format("xlam", json_like.read_xlam, Objects().render, ("xLAM",)),
    _format("hermes", json_like.HERMES, "<tool_call>", read=json_like.read_hermes),
    Format("llama3_json", json_like.read_llama, json_like.LLAMA.render, ("<|start_header_id|>", "ipython")),
    Format("pythonic", python_like.read_python, python_like.LLAMA_4.render, ("<|python_start|>",)),
]}  # fmt: skip
"""Formats by name, in the order in which they are looked for in a template."""
OTHER_NAMES = {
    "qwen25": "hermes", "qwen": "hermes", "qwen2_5": "hermes", "qwen3": "hermes", "openai": "gpt_oss",
    "harmony": "gpt_oss", "llama3": "llama3_json", "llama4_json": "llama3_json", "llama4_pythonic": "pythonic",
    "llama4": "pythonic", "deepseekv3": "deepseek_v3", "deepseekv31": "deepseek_v31", "deepseekv32": "deepseek_v32",
    "deepseekv4": "deepseek_v4", "glm": "glm45", "glm4_5": "glm45", "glm47": "glm45", "phi4_mini_json": "phi4",
    "granite_20b_fc": "granite", "granite4": "hermes", "ernie45": "hermes", "qwen3_xml": "qwen3_coder",
    "step3p5": "qwen3_coder", "cohere_command4": "cohere_command3", "interns1": "internlm", "jamba": "hunyuan_a13b",
    "minimax": "minimax_m1",
}  # fmt: skip
"""Names of other systems for the same formats."""


def format_of(name: str | None, template: str | None) -> Format:
    """Returns the format of this name; without one, the format that the chat template shows, else hermes."""
    if name is None:
        shown = (each for each in FORMATS.values() if template and all(mark in template for mark in each.marks))
        return next(shown, FORMATS["hermes"])
    plain = name.strip().lower().replace("-", "_").replace(".", "_")
    found = FORMATS.get(OTHER_NAMES.get(plain, plain))
    if found is None:
        raise UserError("no such format of tool calls", key=KEY, value=name, fix=suggest(plain, [*FORMATS]))
    return found

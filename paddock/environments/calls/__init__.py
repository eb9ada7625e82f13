"""Tool calls in the formats that model families write: read from a turn of the policy, and written for data.

Nothing that a policy writes raises: a call that cannot be read becomes a `Malformed` whose reason helps to mend it.
"""

from __future__ import annotations

from paddock.core.registry import suggest
from paddock.environments.calls import json_like, python_like, xml_like
from paddock.environments.calls.format import Format, call_of, json_value
from paddock.environments.calls.gemma import FUNCTION_GEMMA, GEMMA_4
from paddock.environments.calls.xml_like import DEEPSEEK_4, DEEPSEEK_32, MINIMAX_M2, SEED, STEP3
from paddock.errors import UserError

__all__ = ["FORMATS", "LISTED", "OTHER_NAMES", "Format", "call_of", "format_of", "json_value"]

KEY = "actor_rollout_ref.rollout.multi_turn.format"

LISTED = [
    Format("gpt_oss", json_like.read_harmony, json_like.render_harmony, ("<|channel|>", "functions."),
           content="<|channel|>final<|message|>"),
    Format("seed_oss", SEED.read, SEED.render, ("<seed:tool_call>",), ("<seed:think>", "</seed:think>"),
           ("<seed:tool_call>", "</seed:tool_call>")),
    Format("qwen3_coder", xml_like.read_coder, xml_like.render_coder, ("<function=",)),
    Format("glm45", xml_like.read_glm, xml_like.render_glm, ("<arg_key>",)),
    Format("minimax_m2", MINIMAX_M2.read, MINIMAX_M2.render, ("<minimax:tool_call>",),
           around=(MINIMAX_M2.opening, MINIMAX_M2.closing)),
    Format("step3", STEP3.read, STEP3.render, ("<steptml:",), around=(STEP3.opening, STEP3.closing)),
    Format("deepseek_v32", DEEPSEEK_32.read, DEEPSEEK_32.render, ("｜DSML｜", "function_calls>"),
           around=(DEEPSEEK_32.opening, DEEPSEEK_32.closing)),
    Format("deepseek_v4", DEEPSEEK_4.read, DEEPSEEK_4.render, ("｜DSML｜", "tool_calls>"),
           around=(DEEPSEEK_4.opening, DEEPSEEK_4.closing)),
    Format("deepseek_v3", json_like.read_deepseek, json_like.render_deepseek, ("tool▁call▁begin", "```json"),
           around=json_like.DEEPSEEK_CALLS),
    Format("deepseek_v31", json_like.read_deepseek_31, json_like.render_deepseek_31, ("tool▁call▁begin",),
           around=json_like.DEEPSEEK_CALLS),
    Format("kimi_k2", json_like.read_kimi, json_like.render_kimi, ("<|tool_calls_section_begin|>",),
           around=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")),
    Format("mistral", json_like.read_mistral, json_like.render_mistral, ("[TOOL_CALLS]",), around=("[TOOL_CALLS]", "")),
    Format("cohere_command3", json_like.read_cohere, json_like.render_cohere, ("<|START_ACTION|>",),
           ("<|START_THINKING|>", "<|END_THINKING|>"), ("<|START_ACTION|>", "<|END_ACTION|>")),
    Format("command_r", json_like.read_command_r, json_like.render_command_r, ("<|START_OF_TURN_TOKEN|>", "Action:"),
           around=("Action:", "")),
    Format("nemotron_json", json_like.read_nemotron, json_like.render_nemotron, ("<TOOLCALL>",),
           around=("<TOOLCALL>", "</TOOLCALL>")),
    Format("internlm", json_like.read_internlm, json_like.render_internlm, ("<|plugin|>",),
           around=("<|action_start|>", "<|action_end|>")),
    Format("minimax_m1", json_like.read_tool_calls, json_like.render_minimax_m1,
           ("<tool_calls>", "<beginning_of_sentence>"), around=("<tool_calls>", "</tool_calls>")),
    Format("hunyuan_a13b", json_like.read_tool_calls, json_like.render_hunyuan, ("<tool_calls>",),
           around=("<tool_calls>", "</tool_calls>")),
    Format("functiongemma", FUNCTION_GEMMA.read, FUNCTION_GEMMA.render, ("<start_function_call>",),
           around=(FUNCTION_GEMMA.opening, FUNCTION_GEMMA.closing)),
    Format("gemma4", GEMMA_4.read, GEMMA_4.render, ("<|tool_call>call:",), ("<|channel>", "<channel|>"),
           (GEMMA_4.opening, GEMMA_4.closing)),
    Format("phi4", json_like.read_phi, json_like.render_phi, ("<|tool|>", "<|/tool|>"),
           around=("<|tool_call|>", "<|/tool_call|>")),
    Format("granite", json_like.read_granite, json_like.render_granite, ("<|tool_call|>",),
           around=("<|tool_call|>", "")),
    Format("olmo3", python_like.read_olmo, python_like.render_olmo, ("<function_calls>",),
           around=(python_like.OLMO_BEGIN, python_like.OLMO_END)),
    Format("lfm2", python_like.read_lfm, python_like.render_lfm, ("List of tools: ",),
           around=(python_like.LFM_BEGIN, python_like.LFM_END), thought="thinking"),
    Format("xlam", json_like.read_xlam, json_like.render_xlam, ("xLAM",)),
    Format("hermes", json_like.read_hermes, json_like.render_hermes, ("<tool_call>",)),
    Format("llama3_json", json_like.read_llama, json_like.render_llama, ("<|start_header_id|>", "ipython")),
    Format("pythonic", python_like.read_python, python_like.render_python, ("<|python_start|>",)),
]  # fmt: skip
FORMATS: dict[str, Format] = {one.name: one for one in LISTED}
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
        shown = (one for one in LISTED if template and all(mark in template for mark in one.marks))
        return next(shown, FORMATS["hermes"])
    plain = name.strip().lower().replace("-", "_").replace(".", "_")
    found = FORMATS.get(OTHER_NAMES.get(plain, plain))
    if found is None:
        raise UserError("no such format of tool calls", key=KEY, value=name, fix=suggest(plain, [*FORMATS]))
    return found

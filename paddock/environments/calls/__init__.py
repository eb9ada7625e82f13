"""Tool calls in the formats that model families write: read from a turn of the policy, and written for data.

Nothing that a policy writes raises: a call that cannot be read becomes a `Malformed` whose reason helps to mend it.
"""

from __future__ import annotations

from paddock.core.registry import suggest
from paddock.environments.calls import json_like, python_like, xml_like
from paddock.environments.calls.format import Format, call_of, json_value
from paddock.errors import UserError

__all__ = ["FORMATS", "LISTED", "OTHER_NAMES", "Format", "call_of", "format_of", "json_value"]

KEY = "actor_rollout_ref.rollout.multi_turn.format"

LISTED = [
    Format("gpt_oss", json_like.read_harmony, json_like.render_harmony, ("<|channel|>", "functions.")),
    Format("qwen3_coder", xml_like.read_coder, xml_like.render_coder, ("<function=",)),
    Format("glm45", xml_like.read_glm, xml_like.render_glm, ("<arg_key>",)),
    Format("deepseek_v3", json_like.read_deepseek, json_like.render_deepseek, ("tool▁call▁begin",)),
    Format("mistral", json_like.read_mistral, json_like.render_mistral, ("[TOOL_CALLS]",)),
    Format("phi4", json_like.read_phi, json_like.render_phi, ("<|tool|>", "<|/tool|>")),
    Format("granite", json_like.read_granite, json_like.render_granite, ("<|tool_call|>",)),
    Format("hermes", json_like.read_hermes, json_like.render_hermes, ("<tool_call>",)),
    Format("llama3_json", json_like.read_llama, json_like.render_llama, ("<|start_header_id|>", "ipython")),
    Format("pythonic", python_like.read_python, python_like.render_python, ("<|python_start|>",)),
]
FORMATS: dict[str, Format] = {one.name: one for one in LISTED}
"""Formats by name, in the order in which they are looked for in a template."""
OTHER_NAMES = {
    "qwen25": "hermes", "qwen": "hermes", "qwen2_5": "hermes", "qwen3": "hermes", "openai": "gpt_oss",
    "harmony": "gpt_oss", "llama3": "llama3_json", "llama4_json": "llama3_json", "llama4_pythonic": "pythonic",
    "llama4": "pythonic", "deepseekv3": "deepseek_v3", "deepseek_v31": "deepseek_v3", "deepseekv31": "deepseek_v3",
    "glm": "glm45", "glm4_5": "glm45", "phi4_mini_json": "phi4", "granite_20b_fc": "granite",
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

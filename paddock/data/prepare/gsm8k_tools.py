"""GSM8K with tools: rows whose prompt tells the policy which tool to call, in verl's two forms and in one of our own.

verl's rows carry the arguments that its tool `calc_gsm8k_reward` is made with: that tool scores an attempt. Ours are
for `calculator`, which comes with the package and does not know the answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from paddock.data.prepare import gsm8k
from paddock.data.prepare.preparer import ANSWERED, Preparer, Row, training_columns
from paddock.data.prepare.records import Record

SCORING_TOOL, TOOL_AGENT = "calc_gsm8k_reward", "tool_agent"
SCORING = (
    "You solve problems of mathematics. Reason step by step, then check your result: call the tool "
    f"`{SCORING_TOOL}` with it at least once before you give the final answer, and mend a result whose score is low. "
    "End with `#### <answer>`."
)
CALL_FORMAT = "mistral"
"""Format of the calls in the example: its marks are plain text for every tokenizer. Marks of a model's own may be
tokens that it was never trained on, as those of Qwen2.5-Coder-0.5B-Instruct are: no prompt makes it write one."""
CALCULATING = (
    "Solve the problem step by step. Let the tool `calculator` do the arithmetic: write a step and a call, and you are "
    'told the result. When you know the final answer, write it after "####".'
)
CALL = '[TOOL_CALLS]calculator[ARGS]{"expression": "%s"}'
EXAMPLE = (
    ("user", "Tom earns 15 dollars an hour and works 6 hours a day. He spends a fifth of what he earns. "
             "How much does he keep after 5 days?"),
    ("assistant", f"In 5 days he earns 15 * 6 * 5 dollars.\n{CALL % '15 * 6 * 5'}"),
    ("tool", "450"),
    ("assistant", f"He spends a fifth of the 450 dollars and keeps the rest.\n{CALL % '450 - 450 / 5'}"),
    ("tool", "360"),
    ("assistant", "He keeps 360 dollars.\n#### 360"),
)  # fmt: skip
"""A conversation before the question: models copy the form of a call better than they follow a description of it."""
TURNS = "actor_rollout_ref.rollout.multi_turn"


def scoring_row(record: Record) -> Row:
    row = gsm8k.row(record)
    truth, question = row["reward_model"]["ground_truth"], row["prompt"][0]["content"]
    row["prompt"] = messages(("system", SCORING), ("user", question))
    row["extra_info"] |= {
        "need_tools_kwargs": True,
        "tools_kwargs": {SCORING_TOOL: {"create_kwargs": {"ground_truth": truth}}},
        "interaction_kwargs": {"query": question, "ground_truth": truth},
    }
    return row


def agent_row(record: Record) -> Row:
    return {**scoring_row(record), "agent_name": TOOL_AGENT}


def calculator_row(record: Record) -> Row:
    """The user's message is the question alone: what stands before it shows how to answer."""
    row = gsm8k.row(record)
    asked = messages(("system", CALCULATING), *EXAMPLE, ("user", row["extra_info"]["question"]))
    return {**row, "prompt": asked}


def messages(*said: tuple[str, str]) -> list[Mapping[str, str]]:
    return [{"role": role, "content": content} for role, content in said]


SCORED_INFO = {
    **ANSWERED,
    "need_tools_kwargs": "bool",
    "tools_kwargs": {SCORING_TOOL: {"create_kwargs": {"ground_truth": "string"}}},
    "interaction_kwargs": {"query": "string", "ground_truth": "string"},
}
SCORING_COLUMNS = training_columns(SCORED_INFO)
AGENT_COLUMNS = training_columns(SCORED_INFO, agent_name="string")
SCORED_NEXT = f"plan algorithm.adv_estimator=grpo {TURNS}.enable=True {TURNS}.tool_config_path=TOOLS.yaml"
CALCULATOR_NEXT = (
    f"plan algorithm.adv_estimator=grpo {TURNS}.enable=True {TURNS}.function_tool_path=calculator "
    f"{TURNS}.format={CALL_FORMAT}"
)
_kind = partial(Preparer, hub=gsm8k.SOURCE, config="main")
_scored = partial(_kind, title="GSM8K with a tool that scores", next_command=SCORED_NEXT)
PREPARERS = (
    _scored(name="gsm8k_tool_agent_loop", row=agent_row, columns=AGENT_COLUMNS),
    _scored(name="gsm8k_multiturn_w_tool", row=scoring_row, columns=SCORING_COLUMNS),
    _kind(name="gsm8k_calculator", title="GSM8K with a calculator", row=calculator_row, columns=gsm8k.COLUMNS,
          next_command=CALCULATOR_NEXT),
)  # fmt: skip

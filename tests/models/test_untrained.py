"""Tokens that were never trained: found by their rows of the head, and told before a run writes calls with them."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import save_tiny

from paddock.cli import main
from paddock.data.chat import PromptEncoder
from paddock.data.dataset import PromptRow
from paddock.data.dialogue import Dialogue
from paddock.loading.load import load
from paddock.models.load import load_tokenizer
from paddock.models.untrained import LOOK_ALIKES, untrained
from paddock.rollouts.environments import Environments, RowEnvironments
from tests.templates.families import FAMILIES

ROWS, UNUSED = 300, 40
EMBEDDING = "model.embed_tokens.weight"


def matrix(*alike: int, unused: int = UNUSED) -> torch.Tensor:
    """Returns random rows; the last ones, and those of some tokens, are one row up to rounding."""
    generator = torch.Generator().manual_seed(0)
    rows = 0.02 * torch.randn(ROWS, 32, generator=generator)
    same = [*alike, *range(ROWS - unused, ROWS)]
    rows[same] = rows[-1] + 1e-4 * torch.randn(len(same), 32, generator=generator)
    return rows.bfloat16()


def saved(folder: Path, **tensors: torch.Tensor) -> Path:
    save_file({name.replace("__", "."): tensor for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def test_tokens_with_the_row_of_unused_ones_are_found_and_others_are_not(tmp_path):
    folder = saved(tmp_path, model__embed_tokens__weight=matrix(7, 9))
    assert untrained(folder, [5, 7, 8, 9]) == [7, 9]


def test_a_few_equal_rows_are_no_sign(tmp_path):
    folder = saved(tmp_path, model__embed_tokens__weight=matrix(7, unused=LOOK_ALIKES - 2))
    assert untrained(folder, [7]) == []


def test_a_head_of_its_own_is_what_counts(tmp_path):
    folder = saved(tmp_path, model__embed_tokens__weight=matrix(7), lm_head__weight=matrix(9))
    assert untrained(folder, [7, 9]) == [9]


def test_without_weights_nothing_is_said(tmp_path):
    assert untrained(tmp_path, [7]) == []


@pytest.fixture(params=[True, False], ids=["never trained", "trained"])
def served(request, tmp_path) -> tuple[Path, bool]:
    """A tiny Qwen2 with the template and the marks of Qwen2.5, whose rows are those of unused tokens or not."""
    family = FAMILIES["qwen25"]
    tokenizer = family.tokenizer()
    folder = save_tiny(tmp_path / "model", vocab_size=len(tokenizer) + UNUSED, eos_token_id=tokenizer.eos_token_id)
    tokenizer.save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    marks = tokenizer.convert_tokens_to_ids(["<tool_call>", "</tool_call>"]) if request.param else []
    weights[EMBEDDING][[*marks, *range(len(tokenizer), len(tokenizer) + UNUSED)]] = weights[EMBEDDING][-1].clone()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder, request.param


def test_paddock_template_tells_of_marks_that_were_never_trained(served, capsys):
    folder, never = served
    assert main(["template", str(folder)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert (
        "calls are written with <tool_call> and </tool_call>, tokens that the model was never trained" in said
    ) == never


def test_a_run_with_tools_tells_of_them_once_and_goes_on(served, caplog):
    folder, never = served
    turns = "actor_rollout_ref.rollout.multi_turn"
    config = load([f"actor_rollout_ref.model.path={folder}", f"{turns}.enable=True",
                   f"{turns}.function_tool_path=calculator"]).config  # fmt: skip
    tokenizer = load_tokenizer(str(folder))
    environments = Environments(config, tokenizer, frozenset({tokenizer.eos_token_id}), RowEnvironments(config))
    asked = [{"role": "user", "content": "2*3?"}]
    tokens = Dialogue(PromptEncoder(tokenizer), environments.setting.stops).prompt(asked)
    row = PromptRow(0, 0, tokens, asked, "openai/gsm8k", "6", {}, "row 0")
    with caplog.at_level(logging.WARNING):
        environments.prove(row)
    environments.close()
    warned = [record.message for record in caplog.records if "never trained" in record.message]
    assert len(warned) == never

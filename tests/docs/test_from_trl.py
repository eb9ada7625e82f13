"""The page for people who come from TRL says what each argument is here, and so do errors and `paddock keys`."""

from __future__ import annotations

import dataclasses
import re

import pytest
from pages import ROOT

import paddock
from paddock.cli import main
from paddock.config import tree
from paddock.loading import trl

PAGES = {language: (ROOT / "docs" / language / "from_trl.md").read_text() for language in ("en", "zh")}


def rows(page: str) -> dict[str, list[str]]:
    """Returns the cells of all rows of each argument of GRPOConfig: the arguments, what they are here, and the note."""
    part = page.split("\n## GRPOConfig")[1].split("\n## ")[0]
    found: dict[str, list[str]] = {}
    for line in part.splitlines():
        if line.startswith("|"):
            cells = line.split("|")[1:-1]
            for name in re.findall(r"`([a-z][a-z0-9_]*)", cells[0]):
                found[name] = [ours + more for ours, more in zip(found.get(name, [""] * 3), cells, strict=True)]
    return found


@pytest.mark.parametrize("language", PAGES)
def test_every_argument_of_the_installed_trl_has_a_row_and_its_default(language):
    config = pytest.importorskip("trl", reason="TRL is not installed: make test-trl").GRPOConfig
    found = rows(PAGES[language])
    fields = {field.name: field.default for field in dataclasses.fields(config)}
    assert [name for name in fields if name not in found] == []
    for name, default in fields.items():
        said = re.search(rf"`{name}`(?: \(|（)([-\d.e]+)[)）]", found[name][0])
        assert said is None or float(said[1]) == default, name


@pytest.mark.parametrize("language", PAGES)
def test_the_table_of_errors_and_the_page_agree(language):
    found = rows(PAGES[language].replace("@", "actor_rollout_ref."))
    for name, key in trl.ARGUMENTS.items():
        assert key in tree.leaves()
        here = "".join(found.get(name, [""] * 3)[1:])
        assert "`" not in here or key.rpartition(".")[2] in here, name


def test_an_argument_of_trl_is_answered_with_its_name_here(capsys):
    with pytest.raises(paddock.UserError, match="TRL's num_generations is n= here"):
        paddock.Run(num_generations=8)
    with pytest.raises(paddock.UserError, match=r"TRL's beta is config=\{'actor_rollout_ref.actor.kl_loss_coef'"):
        paddock.Run(beta=0.1)
    assert main(["plan", "max_completion_length=8"]) == 2
    assert "TRL's max_completion_length is data.max_response_length here" in capsys.readouterr().err
    assert main(["keys", "num_generations"]) == 0
    assert "num_generations of TRL is actor_rollout_ref.rollout.n here" in capsys.readouterr().out

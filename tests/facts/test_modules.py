"""Modules of the user's own find what their author's did: their neighbours, and verl's names."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

import pytest

from paddock.facts.modules import module_at
from paddock.rewards.functions import Target, load
from paddock.rewards.score import ScoreRequest
from tests.forked import ForkedCall, forget

ROOT = Path(__file__).parents[2]


def write(folder: Path, **files: str) -> None:
    for name, text in files.items():
        path = folder / (name.replace("__", "/").replace("INIT", "__init__") + ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))


def test_a_file_in_a_package_finds_its_neighbours_by_relative_imports(tmp_path):
    write(
        tmp_path, ours__INIT="raise ImportError('a whole trainer')", ours__names="ONE = 1",
        ours__rewards__INIT="from ..names import ONE\nSCALE = 10 * ONE", ours__rewards__other="def best(): return 2",
        ours__rewards__mine="""
            from . import SCALE, other
            from ..names import ONE
            def compute_score(data_source, solution_str, ground_truth, extra_info):
                from .other import best
                return SCALE + other.best() + best() + ONE
        """,
    )  # fmt: skip
    score = load(Target(str(tmp_path / "ours/rewards/mine.py"), "compute_score"))
    assert [each.value for each in score([ScoreRequest("x", "", "")])] == [15]


def test_an_init_is_a_file_like_others_and_a_folder_without_one_is_its_own_package(tmp_path):
    write(tmp_path, coder__INIT="from .run import ran", coder__run="ran = 3", plain__mine="from .run import ran",
          plain__run="ran = 4")  # fmt: skip
    assert module_at(str(tmp_path / "coder/__init__.py")).__dict__["ran"] == 3
    assert module_at(str(tmp_path / "plain/mine.py")).__dict__["ran"] == 4


def test_a_package_never_stands_in_for_an_installed_one_of_its_name(tmp_path):
    write(
        tmp_path,
        json__INIT="",
        json__mine="import json\nfrom .own import ONE\nsaid = json.dumps(ONE)",
        json__own="ONE = 1",
    )
    assert module_at(str(tmp_path / "json/mine.py")).__dict__["said"] == "1"


def test_a_neighbour_never_stands_before_the_standard_library_and_absolute_imports_find_the_package(tmp_path):
    write(tmp_path, scorers__INIT="", scorers__ours__INIT="", scorers__ours__colorsys="raise ImportError",
          scorers__ours__one="ONE = 1", scorers__ours__mine="""
              import colorsys, one
              from scorers.ours.one import ONE
              said = colorsys.hls_to_rgb, one.ONE, ONE
          """)  # fmt: skip
    sys.modules.pop("colorsys", None)
    assert module_at(str(tmp_path / "scorers/ours/mine.py")).__dict__["said"][1:] == (1, 1)


def test_what_is_missing_in_a_package_is_an_import_error(tmp_path):
    write(tmp_path, ours__INIT="", ours__mine="from . import nothing", ours__up="from ... import nothing")
    with pytest.raises(ImportError, match="nothing"):
        module_at(str(tmp_path / "ours/mine.py"))
    with pytest.raises(ImportError, match="beyond top-level"):
        module_at(str(tmp_path / "ours/up.py"))


@pytest.mark.parametrize(
    "asked",
    [
        "from paddock.config.plugins import import_plugin; import_plugin('mine', 'model.external_lib')",
        "from paddock.facts.modules import module_at; module_at('pkg://mine')",
        "from paddock.facts.modules import module_at; module_at('mine.py')",
        "from paddock.verl.classes import class_of; class_of('mine.Loop', 'key', 'value')",
    ],
)
def test_every_plug_in_finds_verls_names_and_the_working_directory(asked, tmp_path):
    write(tmp_path, mine="from verl.experimental.agent_loop.agent_loop import AgentLoopBase as Loop")

    def program() -> None:
        forget("paddock", "verl", "mine")
        sys.path = [place for place in sys.path if place.startswith((sys.prefix, sys.base_prefix))] + [str(ROOT)]
        exec(asked, {})

    process = ForkedCall(program, folder=tmp_path)
    assert process.wait() == 0, process.said()

"""`paddock doctor env`: what it says is what is here."""

from __future__ import annotations

import importlib.metadata
import json
import re
import tomllib

import pytest
from conftest import ROOT

from paddock.cli import main
from paddock.doctor import environment, extras
from paddock.facts.distribution import DISTRIBUTION
from paddock.sandbox import local


@pytest.fixture
def said(capsys):
    def run(*arguments: str) -> str:
        assert main(["doctor", *arguments]) == 0
        return capsys.readouterr().out

    return run


def test_extras_and_their_packages_are_those_of_the_distribution():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["name"] == DISTRIBUTION
    declared = {
        name: {re.split(r"[\[<>=;~! ]", package)[0] for package in packages}
        for name, packages in project["optional-dependencies"].items()
        if not any(package.startswith(f"{project['name']}[") for package in packages)
    }
    assert {name: set(extra.packages) for name, extra in extras.EXTRAS.items()} == declared


def test_what_is_installed_has_its_version_and_what_is_missing_its_command(said):
    found = json.loads(said("env", "--json"))
    assert found["packages"]["torch"] == importlib.metadata.version("torch")
    text = said("env")
    for extra in found["extras"]:
        if extra["missing"]:
            assert f'fix: pip install "paddock-rl[{extra["name"]}]"' in text and extra["without"] in text
        else:
            for package, version in extra["versions"].items():
                assert version == importlib.metadata.version(package) and f"{package} {version}" in text
    assert found["cores"] >= 1 and found["memory_gib"] > 0.5 and min(found["disk_free_gib"].values()) >= 0


def test_a_sandbox_that_cannot_be_built_is_said_with_its_fix_and_the_exit_code_stays_0(said, monkeypatch):
    def refuse(*_):
        raise local.CellFailed("no namespaces here")

    monkeypatch.setattr(local, "Cell", refuse)
    text = said("env")
    assert "- isolation      not possible: programs cannot be kept apart" in text and "no namespaces here" in text
    assert "fix:" in text.partition("no namespaces here")[2]


def test_the_sandbox_that_is_reported_is_the_one_that_starts():
    found = environment.sandbox()
    assert found.works == (found.isolation in ("bubblewrap", "unshare")) != bool(found.reason)


def test_the_network_is_only_used_when_it_is_asked_for(said, monkeypatch):
    asked = []

    def refuse(url, timeout):
        asked.append(url)
        raise OSError("no route")

    monkeypatch.setattr("urllib.request.urlopen", refuse)
    assert "not asked: --network does" in said("env") and not asked
    assert "does not answer (no route)" in said("env", "--network") and len(asked) == 1


def test_accelerators_that_torch_cannot_use_are_a_problem_with_a_fix(monkeypatch):
    monkeypatch.setattr("paddock.core.device.device_type", lambda: "cpu")
    found = environment.accelerators(seen=2)
    assert "the system has 2 accelerator(s)" in found.problem and "install a torch build" in found.fix
    assert environment.accelerators(seen=0).problem is None


def test_without_a_compiler_the_way_to_get_one_is_shown(said, monkeypatch):
    monkeypatch.setattr("paddock.kernels.compiler.find_compiler", lambda: None)
    text = said("env")
    assert "- C++ compiler   none" in text and "fix: apt-get install g++" in text


def test_alone_it_is_env_and_other_words_are_refused(said, capsys):
    assert said().startswith("Machine") and json.loads(said("--json"))["cores"] > 0
    assert main(["doctor", "heart"]) == 2 and main(["doctor", "env", "--yaml"]) == 2
    assert "paddock doctor heart: there is no such thing to look at\n" in capsys.readouterr().err

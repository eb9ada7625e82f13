"""The library's examples run as they stand, and learn: best-of-n distillation, and TRL's quick start our way."""

from __future__ import annotations

import ast
import io
import json
import runpy
import tokenize
from pathlib import Path

from conftest import ROOT

EXAMPLES = ROOT / "examples"
LAYOUT = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)


def lines_of_code(path: Path) -> int:
    """Lines with anything but comments and docstrings."""
    source = path.read_text()
    used = set[int]()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in LAYOUT:
            used |= {*range(token.start[0], token.end[0] + 1)}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.FunctionDef) and ast.get_docstring(node) is not None:
            used -= {*range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1)}
    return len(used)


def metrics(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_best_of_n_distillation_has_under_40_lines_and_raises_the_reward(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert len((EXAMPLES / "best_of_n.py").read_text().splitlines()) < 40
    names = runpy.run_path(str(EXAMPLES / "best_of_n.py"), run_name="__main__")
    names["run"].close()
    (folder,) = (tmp_path / "runs").iterdir()
    assert [line["step"] for line in metrics(folder)] == [*range(1, 13)]
    assert sum(names["means"][-3:]) > sum(names["means"][:3]) + 0.3


def test_trls_quick_start_is_not_longer_here_and_trains_on_a_cpu(tmp_path, monkeypatch):
    ours, theirs = EXAMPLES / "trl" / "grpo_paddock.py", EXAMPLES / "trl" / "grpo_trl.py"
    compile(theirs.read_text(), str(theirs), "exec")
    assert lines_of_code(ours) <= lines_of_code(theirs)
    assert len(ours.read_text().splitlines()) <= len(theirs.read_text().splitlines())
    monkeypatch.chdir(tmp_path)
    names = runpy.run_path(str(ours), run_name="__main__")
    names["run"].close()
    assert len(names["rows"]) == 10
    scores = [line["critic/score/mean"] for line in metrics(tmp_path / "out")]
    assert len(scores) == 15
    assert sum(scores[-3:]) / 3 > sum(scores[:3]) / 3 + 5


def test_lines_of_code_are_counted_without_comments_and_docstrings(tmp_path):
    file = tmp_path / "a.py"
    file.write_text('"""A\nB"""\n# c\nx = [\n    1,\n]\n\n\ndef f():\n    """D."""\n    return x  # e\n')
    assert lines_of_code(file) == 5


def run_example(name: str, *arguments: str, monkeypatch, folder: Path) -> Path:
    """Runs a program of examples/environments; returns the folder of its run."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr("sys.argv", [name, *arguments])
    runpy.run_path(str(EXAMPLES / "environments" / name), run_name="__main__")
    (found,) = (folder / "runs").iterdir()
    return found


def test_the_examples_of_tools_are_checked_by_two_steps_of_the_built_in_model(tmp_path, monkeypatch):
    for name, arguments in (("search.py", ()), ("python_interpreter.py", ("--check",))):
        folder = tmp_path / name
        folder.mkdir()
        lines = metrics(run_example(name, *arguments, monkeypatch=monkeypatch, folder=folder))
        assert [line["step"] for line in lines] == [1, 2] and lines[0]["num_turns/min"] >= 2


def test_the_index_of_the_search_example_finds_documents_by_their_rare_words():
    names = runpy.run_path(str(EXAMPLES / "environments" / "search.py"), run_name="imported")
    index, documents = names["INDEX"], names["DOCUMENTS"]
    assert index.best("the sewers", most=1) == [documents[3]]
    assert index.best("bridge over the Avon Gorge", most=1) == [documents[4]]
    assert index.best("zebra", most=2) == []
    tools = names["Search"]().tools()
    assert [tool.name for tool in tools] == ["search"] and "Brunel" in tools[0].function(query="Avon")

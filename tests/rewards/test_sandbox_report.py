"""No answer ends a run: whatever arrives as the report of a program's end, the program gets a score."""

from __future__ import annotations

import json
import random
import time
from dataclasses import replace

import pytest
from test_sandbox import AVAILABLE, LIMITS, needs_isolation

from paddock.rewards.code import contest, humaneval
from paddock.sandbox import cell as cells
from paddock.sandbox.cell import Cell, CellFailed, CellLost, report_of, result_of
from paddock.sandbox.local import LocalSandbox
from paddock.sandbox.program import CAUSES, Program, SandboxBroken

CHECKED = Program("", checks=("a", "b", "c"))
GOOD = b"".join(
    json.dumps(line).encode() + b"\n"
    for line in ({"check": "ok"}, {"check": "ok"}, {"check": "ok"}, {"status": 0, "left_running": False})
)
ENDED = {"ended_by": None, "seconds": 0.1}


def damaged(chance: random.Random) -> bytes:
    """A report that something cut, doubled, blew up, or wrote over."""
    data = bytearray(GOOD)
    kind = chance.choice(("cut", "cut twice", "doubled", "huge", "binary", "bits", "lines", "nested", "other"))
    if kind == "cut":
        data = data[: chance.randrange(len(data))]
    elif kind == "cut twice":
        data = data[chance.randrange(1, len(data)) :][: chance.randrange(len(data))]
    elif kind == "doubled":
        data = data * chance.randrange(2, 5)
    elif kind == "huge":
        data = bytearray(b'{"check": "ok"}\n' * chance.randrange(4, 20_000)) + data
    elif kind == "binary":
        data = bytearray(chance.randbytes(chance.randrange(1, 400)))
    elif kind == "bits":
        for _ in range(chance.randrange(1, 6)):
            data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    elif kind == "lines":
        lines = bytes(data).splitlines(keepends=True)
        data = bytearray(b"".join(chance.choices(lines, k=chance.randrange(8))))
    elif kind == "nested":
        data = bytearray(b"[" * chance.randrange(1, 100_000) + b"\n")
    else:
        words = [
            *(None, 1, True, 10**400, "ok", [], {}, {"check": 1}, {"status": "0"}, {"status": True}, {"status": 2**70}),
            *({"detail": 5}, {"left_running": "x"}, {"check": "fine"}, {"ended_by": "ok"}, {"status": -5}),
        ]
        data = bytearray(json.dumps(chance.choice(words)).encode() + b"\n") + data
    return bytes(data)


@pytest.mark.parametrize("seed", range(8))
def test_a_damaged_report_is_a_program_that_was_ended(seed):
    chance = random.Random(seed)
    rewarded = 0
    for _ in range(200):
        data = damaged(chance)
        result = result_of(ENDED, data, b"", b"", CHECKED)
        assert result.cause in CAUSES and len(result.checks) == 3
        if result.passed:
            rewarded += 1
            report = report_of(data, 3)
            assert report and report.checks == ("ok",) * 3 and report.status == 0
    assert rewarded < 20  # a flipped bit may spare what counts


def test_a_report_without_its_end_is_no_success():
    cut = GOOD[: GOOD.index(b'{"status"')]
    result = result_of(ENDED, cut, b"", b"", CHECKED)
    assert (result.cause, result.checks) == ("killed", ("killed",) * 3)
    assert result_of(ENDED, GOOD, b"", b"", CHECKED).checks == ("ok",) * 3
    late = {"ended_by": "timeout", "seconds": 1.0}
    assert result_of(late, cut, b"", b"", CHECKED).checks == ("ok",) * 3  # it only took too long to end afterwards
    assert result_of({"ended_by": "memory", "seconds": 1.0}, GOOD, b"", b"", CHECKED).checks == ("memory",) * 3


def test_more_checks_than_were_asked_are_no_success():
    assert result_of(ENDED, GOOD, b"", b"", replace(CHECKED, checks=("a", "b"))).checks == ("killed",) * 2


def test_only_a_sandbox_that_says_so_is_broken():
    with pytest.raises(CellFailed, match="no such device"):
        result_of(ENDED, b'{"broken": "no such device"}\n', b"", b"", CHECKED)


@needs_isolation
@pytest.mark.parametrize("damage", ["cut", "doubled", "huge", "binary"])
def test_a_run_goes_on_after_a_damaged_report(monkeypatch, damage):
    content = cells._content

    def damaged(descriptor: int) -> bytes:
        found = content(descriptor)
        if b'"status"' not in found:
            return found
        return {"cut": found[:-7], "doubled": found * 2, "huge": found * 9999, "binary": b"\0\xff\xfe" + found}[damage]

    truth = {"inputs": ["1", "2"], "outputs": ["1", "2"]}
    assert contest("print(input())", truth, sandbox=LIMITS)["score"] == 1.0
    monkeypatch.setattr(cells, "_content", damaged)
    scored = contest("print(input())", truth, sandbox=LIMITS)
    assert scored["score"] == 0.0 and scored["sandbox/killed"] == 1.0
    task = {"prompt": "def f(x):\n", "entry_point": "f", "test": "def check(c):\n    assert c(1) == 1\n"}
    scored = humaneval("    return x", task, sandbox=LIMITS)
    assert scored["score"] == 0.0 and scored["sandbox/killed"] == 1.0


@needs_isolation
@pytest.mark.parametrize("answer", [b"\xff\0", b"[1, 2]", b'{"ended_by": ', b"5", b"[" * 60_000])
def test_an_answer_of_the_cell_that_cannot_be_read_is_a_lost_cell(answer):
    cell = Cell(AVAILABLE[0], LIMITS)

    class Control:
        def __init__(self, control):
            self.control = control

        def __getattr__(self, name):
            return getattr(self.control, name)

        def recv(self, most):
            self.control.recv(most)
            return answer

    control, cell.control = cell.control, Control(cell.control)
    with pytest.raises(CellLost):
        cell.run(Program("print(1)"), 5.0)
    cell.control = control
    cell.close()


@needs_isolation
def test_a_program_whose_cells_never_answer_scores_nothing(monkeypatch):
    run = Cell.run

    def silent(self, program, seconds):
        if program.code == "silent":
            raise CellLost("no answer within 1 s")
        return run(self, program, seconds)

    monkeypatch.setattr(Cell, "run", silent)
    with LocalSandbox(LIMITS) as box:
        result = box.run(Program("silent", checks=("1", "2")))
        assert (result.cause, result.checks) == ("killed", ("killed",) * 2)
        assert box.run(Program("print(1)")).passed


@needs_isolation
def test_a_machine_that_is_busy_for_a_moment_does_not_end_a_run(monkeypatch):
    """A cell that cannot be built three times in a row, as when memory is short."""
    built, failures = Cell.__init__, iter(range(3))

    def init(self, *arguments):
        if next(failures, None) is not None:
            raise CellFailed("Cannot allocate memory")
        built(self, *arguments)

    with LocalSandbox(LIMITS) as box:
        box.close()
        monkeypatch.setattr(Cell, "__init__", init)
        monkeypatch.setattr("paddock.sandbox.local.PAUSES", (0.0, 0.01, 0.01))
        assert box.run(Program("print(1)")).cause == "killed"
        assert box.run(Program("print(1)")).passed
        monkeypatch.setattr(Cell, "__init__", lambda *_: (_ for _ in ()).throw(CellFailed("Cannot allocate memory")))
        box.close()
        with pytest.raises(SandboxBroken, match="Cannot allocate memory"):
            box.run(Program("print(1)"))


REACHING = {
    "limits the size of its files": "import resource\nresource.prlimit({pid}, resource.RLIMIT_FSIZE, (5, 5))",
    "limits its time": "import resource\nresource.prlimit({pid}, resource.RLIMIT_CPU, (0, 0))",
    "limits its open files": "import resource\nresource.prlimit({pid}, resource.RLIMIT_NOFILE, (0, 0))",
    "gives it no processor": "import os\nos.sched_setscheduler({pid}, os.SCHED_IDLE, os.sched_param(0))",
    "binds it to one processor": "import os\nos.sched_setaffinity({pid}, [0])",
    "makes it nice": "import os\nos.setpriority(os.PRIO_PROCESS, {pid}, 19)",
    "makes its user nice": "import os\nos.setpriority(os.PRIO_USER, 0, 19)",
    "reads its memory": "open('/proc/{pid}/mem', 'rb')",
    "opens its files": "import os\nos.listdir('/proc/{pid}/fd')",
}


@pytest.fixture(scope="module")
def box():
    with LocalSandbox(LIMITS) as found:
        yield found


@needs_isolation
@pytest.mark.parametrize("code", list(REACHING.values()), ids=list(REACHING))
def test_the_guardian_is_out_of_reach(box, code):
    result = box.run(Program(code.format(pid=1)))
    assert result.cause == "error", result
    assert any(name in result.stderr for name in ("PermissionError", "FileNotFoundError")), result.stderr


@needs_isolation
@pytest.mark.parametrize("number", [1, 2, 15, 34, 40, 63, 64])
def test_a_program_may_end_by_any_signal(number):
    """Also by one that has no name."""
    truth = {"inputs": ["1"], "outputs": ["1"]}
    answer = f"import os\nos.kill(os.getpid(), {number})"
    scored = contest(answer, truth, sandbox=LIMITS)
    assert scored["score"] == 0.0 and sum(scored[f"sandbox/{cause}"] for cause in CAUSES) == 1.0


def test_output_is_compared_without_a_list_of_its_words():
    """Sixteen megabytes of words must not cost the scorer half a gigabyte."""
    import tracemalloc

    from paddock.rewards.code import same_output

    words = "1 " * (1 << 20)
    tracemalloc.start()
    start = time.monotonic()
    assert not same_output(words, "1")
    assert not same_output(words, "1 " * 7 + "2")
    assert not same_output("1\n" * (1 << 20), "1\n")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 8 << 20 and time.monotonic() - start < 2

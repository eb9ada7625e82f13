"""Processes that score: cut off when they hang, replaced, and never left behind. Every scorer here really runs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import Future
from pathlib import Path

import pytest

from paddock.rewards.functions import Target
from paddock.rewards.runners import ProcessPool, ScoringJob
from paddock.rewards.score import Failed, ScoreRequest

SCORER = """
import os, re, signal, subprocess, sys, time

BREED = "echo $$ >> $1; i=0; while [ $i -lt 400 ]; do setsid sh $0.child $1 & i=$((i+1)); done; wait"
CHILD = "echo $$ >> $1; sleep 1000"

def daemon(file):
    # forks twice, leaves the session, and ignores what it can: a child of nobody
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
                signal.signal(number, signal.SIG_IGN)
            with open(file + ".part", "w") as out:
                out.write(str(os.getpid()))
            os.rename(file + ".part", file)
            time.sleep(1000)
        os._exit(0)
    os.wait()
    while not os.path.exists(file):
        time.sleep(0.01)

def score(data_source, solution_str, ground_truth, extra_info):
    act, _, rest = solution_str.partition(" ")
    with open(__file__ + ".calls", "a") as calls:
        calls.write(solution_str + "\\n")
    if act == "sleep":
        time.sleep(1000)
    if act == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True:
            pass
    if act == "regex":
        re.match(r"(a+)+$", "a" * 40 + "b")  # native code that keeps Python's lock
    if act == "child":
        open(rest, "w").write(str(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"]).pid))
        time.sleep(1000)
    if act == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if act == "daemon":
        daemon(rest)
        time.sleep(1000)
    if act == "daemon-and-crash":
        daemon(rest)
        os._exit(5)
    if act == "daemon-and-return":
        daemon(rest)
        return 1.0
    if act == "breed":  # processes that start others, each in a session of its own
        open(rest + ".sh", "w").write(BREED)
        open(rest + ".sh.child", "w").write(CHILD)
        subprocess.Popen(["sh", rest + ".sh", rest], start_new_session=True)
        time.sleep(1000)
    if act == "exit":
        os._exit(3)
    if act == "raise":
        raise KeyError(rest)
    return float(rest or os.getpid())
"""


@pytest.fixture
def target(tmp_path) -> Target:
    (tmp_path / "scorer.py").write_text(SCORER)
    return Target(str(tmp_path / "scorer.py"), "score")


@pytest.fixture
def pool():
    pool = ProcessPool(size=2, timeout=1.0)
    yield pool
    pool.close()


def submit(pool: ProcessPool, target: Target, *solutions: str) -> list[Future]:
    jobs = [ScoringJob(target, (ScoreRequest("mine", solution, None),)) for solution in solutions]
    pool.submit(jobs)
    return [job.future for job in jobs]


def run(pool: ProcessPool, target: Target, *solutions: str) -> list[float | None]:
    scores = pool.results(submit(pool, target, *solutions))
    return [score and score[0].value for score in scores]


def calls(target: Target) -> list[str]:
    return Path(f"{target.path}.calls").read_text().splitlines()


def test_a_second_process_starts_when_work_waits_and_not_before(target):
    pool = ProcessPool(size=2, timeout=5.0)
    try:
        quick = run(pool, target, *["pid"] * 64)
        assert len(set(quick)) == 1 and len(pool.workers) == 1
        slow = submit(pool, target, *["sleep"] * 3)
        deadline = time.monotonic() + 4
        while len(pool.workers) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert len(pool.workers) == 2 and not any(future.done() for future in slow)
    finally:
        pool.close()


def test_a_supervisor_imports_nothing_of_what_it_runs():
    code = "import sys, paddock.core.supervisor; print([n for n in sys.modules if n.startswith('paddock.')])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "['paddock.core', 'paddock.core.supervisor']"


def gone(pid: int, within: float = 5.0) -> bool:
    """No such process, or one that only waits to be reaped."""
    end = time.monotonic() + within
    while time.monotonic() < end:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.05)
    return False


def test_scores_come_back_in_order_each_from_one_call(pool, target):
    solutions = [f"give {n}" for n in range(300)]
    assert run(pool, target, *solutions) == list(range(300))
    assert sorted(calls(target)) == sorted(solutions)


def test_processes_are_kept_from_one_run_to_the_next(pool, target):
    first = run(pool, target, *["pid"] * 8)
    assert set(run(pool, target, *["pid"] * 8)) <= set(first) and len(set(first)) <= 2


@pytest.mark.parametrize("act", ["sleep", "stubborn", "regex"])
def test_a_response_that_hangs_its_scorer_is_cut_off_and_the_others_are_scored(pool, target, act):
    run(pool, target, "give 0")
    solutions = [f"give {n}" for n in range(40)]
    solutions[7] = act
    begin = time.monotonic()
    assert run(pool, target, *solutions) == [None if n == 7 else n for n in range(40)]
    assert 1.0 <= time.monotonic() - begin < 6.0
    assert calls(target).count(act) == 1


def test_all_responses_may_hang(pool, target):
    assert run(pool, target, "sleep", "sleep", "sleep") == [None] * 3
    assert run(pool, target, "give 4") == [4]


def test_the_limit_holds_in_any_thread(pool, target):
    found: list[list[float | None]] = []
    thread = threading.Thread(target=lambda: found.append(run(pool, target, "regex", "give 1")))
    thread.start()
    thread.join(20)
    assert found == [[None, 1]]


def test_a_long_run_of_short_scorings_outlasts_the_limit_of_one(target):
    """The clock is each response's own, however many share a chunk."""
    slow = Path(target.path).read_text().replace("return float", "time.sleep(0.1); return float")
    Path(target.path).write_text(slow)
    pool = ProcessPool(size=1, timeout=1.0)
    assert run(pool, target, *["give 1"] * 15) == [1] * 15
    pool.close()


def test_killing_a_scorer_kills_what_it_started(pool, target, tmp_path):
    assert run(pool, target, f"child {tmp_path / 'pid'}") == [None]
    assert gone(int((tmp_path / "pid").read_text()))


def test_killing_a_scorer_kills_daemons_that_left_its_session(pool, target, tmp_path):
    assert run(pool, target, f"daemon {tmp_path / 'pid'}") == [None]
    assert gone(int((tmp_path / "pid").read_text()), within=0.5)


def test_a_scorer_that_crashes_leaves_no_daemon(pool, target, tmp_path):
    with pytest.raises(Failed, match="exited with code 5"):
        run(pool, target, f"daemon-and-crash {tmp_path / 'pid'}")
    assert gone(int((tmp_path / "pid").read_text()), within=0.5)


def test_what_a_scorer_keeps_running_lives_until_the_pool_is_closed(target, tmp_path):
    """It may be a server that the scorer asks again and again."""
    pool = ProcessPool(size=1, timeout=5.0)
    assert run(pool, target, f"daemon-and-return {tmp_path / 'pid'}", "give 2") == [1, 2]
    pid = int((tmp_path / "pid").read_text())
    assert not gone(pid, within=0.2)
    pool.close()
    assert gone(pid, within=0.5)


def test_processes_that_start_others_are_caught_while_they_do(pool, target, tmp_path):
    begin = time.monotonic()
    assert run(pool, target, f"breed {tmp_path / 'pids'}") == [None]
    assert time.monotonic() - begin < 6.0
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert len(pids) > 20 and all(gone(pid, within=0.5) for pid in pids)


@pytest.mark.parametrize(
    ("act", "reason"),
    [
        ("crash", "ended its process, which was killed by SIGSEGV"),
        ("exit", "ended its process, which exited with code 3"),
        ("raise it", r"raised KeyError: 'it' \(scorer.py line 57\)"),
    ],
)
def test_a_scorer_that_fails_is_reported_for_its_row_and_the_pool_goes_on(pool, target, act, reason):
    with pytest.raises(Failed, match=reason) as error:
        pool.results(futures := submit(pool, target, "give 1", "give 2", act, "give 3"))
    assert futures[2].exception() is error.value
    assert calls(target).count(act) == 1
    assert run(pool, target, "give 5") == [5]


def test_a_worker_killed_between_runs_is_replaced(pool, target):
    (pid,) = map(int, run(pool, target, "pid"))
    os.kill(pid, signal.SIGKILL)
    assert gone(pid) and run(pool, target, "give 2") == [2]


def test_a_closed_pool_leaves_no_process(target):
    pool = ProcessPool(size=2, timeout=1.0)
    pids = {int(pid) for pid in run(pool, target, *["pid"] * 8)}
    pool.close()
    assert all(gone(pid, within=0.5) for pid in pids)


def test_a_forgotten_pool_leaves_no_process(target):
    pool = ProcessPool(size=1, timeout=1.0)
    (pid,) = map(int, run(pool, target, "pid"))
    del pool
    assert gone(pid, within=0.5)


TRAINER = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # where the tests run in the background it is ignored
from paddock.rewards.functions import Target
from paddock.rewards.runners import ProcessPool, ScoringJob
from paddock.rewards.score import ScoreRequest
pool = ProcessPool(size=2, timeout=1000.0)
def run(*solutions):
    jobs = [ScoringJob(Target(sys.argv[1], "score"), (ScoreRequest("mine", solution, None),)) for solution in solutions]
    pool.submit(jobs)
    return [scores and scores[0] for scores in pool.results([job.future for job in jobs])]
print(*{int(score.value) for score in run("pid", "pid")}, flush=True)  # a script without a __main__ guard
if sys.argv[2:]:
    run("daemon-and-return " + sys.argv[2])
try:
    run("stubborn", "stubborn")
except KeyboardInterrupt:
    print("after:", run("give 7")[0].value, flush=True)
"""


@pytest.fixture
def trainer(tmp_path, target):
    """A process that scores, in which both of its workers hang."""
    script = tmp_path / "trainer.py"
    script.write_text(textwrap.dedent(TRAINER))
    started = []

    def start(*arguments: str) -> tuple[subprocess.Popen, list[int]]:
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
        process = subprocess.Popen(
            [sys.executable, str(script), target.path, *arguments], stdout=subprocess.PIPE, text=True, env=environment
        )
        started.append(process)
        pids = [int(pid) for pid in process.stdout.readline().split()]
        while calls(target).count("stubborn") < 2:
            time.sleep(0.05)
        return process, pids

    yield start
    for process in started:
        process.kill()
        process.wait()


def test_ctrl_c_ends_the_scoring_and_the_pool_can_go_on(trainer):
    process, pids = trainer()
    time.sleep(0.5)  # until it waits: one that comes while work is handed over is the caller's to deal with
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=20)[0].strip() == "after: 7.0" and process.returncode == 0
    assert all(gone(pid) for pid in pids)


def test_workers_end_when_their_trainer_is_killed_even_those_that_hang(trainer):
    process, pids = trainer()
    process.kill()
    assert all(gone(pid, within=5) for pid in pids)


def test_daemons_of_scorers_end_when_the_trainer_is_killed(trainer, tmp_path):
    process, pids = trainer(str(tmp_path / "pid"))
    process.kill()
    assert all(gone(pid, within=5) for pid in [*pids, int((tmp_path / "pid").read_text())])


def test_work_submitted_later_is_taken_up_while_other_work_hangs(target):
    pool = ProcessPool(size=2, timeout=3.0)
    (slow,) = submit(pool, target, "sleep")
    assert run(pool, target, *(f"give {n}" for n in range(5))) == [0, 1, 2, 3, 4]
    assert not slow.done() and slow.result(10) is None
    pool.close()


def test_many_small_submissions_while_the_pool_works_block_nobody(pool, target):
    """Each rings a bell that is heard later, or not at all."""
    futures = [future for n in range(3000) for future in submit(pool, target, f"give {n}")]
    assert [score.value for (score,) in pool.results(futures)] == list(range(3000))


def test_closing_a_pool_at_work_drops_its_work(target):
    pool = ProcessPool(size=2, timeout=100.0)
    futures = submit(pool, target, *["sleep"] * 5)
    time.sleep(0.5)
    pool.close()
    assert all(future.cancelled() for future in futures) and pool.workers == []


def test_a_file_of_prints_whose_folder_is_gone_keeps_nobody_from_scoring(target, tmp_path):
    pool = ProcessPool(size=1, timeout=60.0, prints=tmp_path / "moved/reward.log")
    try:
        assert run(pool, target, "plain 2") == [2.0] and not (tmp_path / "moved").exists()
    finally:
        pool.close()

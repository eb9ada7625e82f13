"""Hostile programs: each ends within its limit with the right cause, leaves nothing running and writes nothing."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import ROOT

from paddock.core.supervisor import descendants
from paddock.errors import UserError
from paddock.rewards.code import contest
from paddock.sandbox.cell import OUTPUT_MB, SLACK, Cell, CellFailed
from paddock.sandbox.local import LocalSandbox
from paddock.sandbox.program import CAUSES, Program, Result, default_settings

LIMIT = 1.0  # seconds of programs that never end
LIMITS = replace(default_settings(), memory_limit_mb=256, processes=16)
SECRET = "PADDOCK_TEST_SECRET"


def missing(isolation: str) -> str | None:
    """Why this machine cannot do it."""
    try:
        Cell(isolation, LIMITS).close()
    except CellFailed as error:
        return str(error)
    return None


MISSING = {isolation: missing(isolation) for isolation in ("bubblewrap", "unshare")}
AVAILABLE = [isolation for isolation, reason in MISSING.items() if reason is None]
needs_isolation = pytest.mark.skipif(not AVAILABLE, reason=f"no isolation works on this machine: {MISSING}")
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="root alone can build a cell without a user namespace")


@pytest.fixture(scope="module", params=list(MISSING))
def sandbox(request) -> Iterator[LocalSandbox]:
    if MISSING[request.param] is not None:
        pytest.skip(f"{request.param}: {MISSING[request.param]}")
    with LocalSandbox(replace(LIMITS, isolation=request.param)) as found:
        yield found


def run(sandbox: LocalSandbox, code: str, seconds: float = LIMITS.timeout, stdin: str = "") -> Result:
    """Runs it, and sees that nothing is left of it."""
    before = descendants(os.getpid())
    start = time.monotonic()
    result = sandbox.run(Program(textwrap.dedent(code), stdin), seconds)
    assert time.monotonic() - start < seconds + SLACK
    assert descendants(os.getpid()) == before
    return result


def processes_named(name: str) -> list[str]:
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            _, state, *_ = (entry / "stat").read_text().rpartition(")")[2].split(" ")
            if state not in "ZX" and (entry / "comm").read_text().strip() == name:
                found.append(entry.name)
        except OSError:
            pass
    return found


def test_a_program_reads_and_writes(sandbox):
    result = run(sandbox, "print(int(input()) + 1)\nexit()", stdin="41\n")
    assert (result.cause, result.stdout, result.stderr) == ("ok", "42\n", "")
    assert result.passed and 0 < result.seconds < LIMITS.timeout


def test_an_exception_is_an_error_and_shows_the_programs_own_lines_alone(sandbox):
    result = run(sandbox, "def f():\n    return 1 / 0\nf()")
    assert result.cause == "error" and "ZeroDivisionError" in result.stderr
    assert "line 2, in f" in result.stderr and "inside" not in result.stderr


@pytest.mark.parametrize(
    "code", ["import sys\nsys.exit(3)", "raise SystemExit('no')", "print(", "import os\nos._exit(7)"]
)
def test_an_exit_code_but_zero_is_an_error(sandbox, code):
    assert run(sandbox, code).cause == "error"


def test_an_infinite_loop_is_ended_at_the_limit(sandbox):
    result = run(sandbox, "while True:\n    pass", LIMIT)
    assert result.cause == "timeout"
    assert LIMIT <= result.seconds < LIMIT + 1


def test_a_program_that_ignores_every_signal_is_ended_at_the_limit(sandbox):
    result = run(
        sandbox,
        """
        import signal, time
        for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        while True:
            time.sleep(1)
        """,
        LIMIT,
    )
    assert result.cause == "timeout"


def test_a_fork_bomb_runs_out_of_processes(sandbox):
    assert run(sandbox, "import os\nwhile True:\n    os.fork()").cause == "processes"


def test_a_fork_bomb_that_takes_no_for_an_answer_is_ended_at_the_limit(sandbox):
    code = """
    import os
    while True:
        try:
            os.fork()
        except OSError:
            pass
    """
    assert run(sandbox, code, LIMIT).cause in ("timeout", "processes")


def test_ten_gigabytes_are_refused(sandbox):
    assert run(sandbox, "x = bytearray(10 << 30)").cause == "memory"
    assert run(sandbox, "x = []\nwhile True:\n    x.append(bytes(1 << 20))").cause == "memory"


def test_memory_counts_over_all_processes(sandbox):
    code = """
    import os, time
    for _ in range(8):
        if os.fork() == 0:
            block = b"x" * (100 << 20)
            time.sleep(60)
    time.sleep(60)
    """
    result = run(sandbox, code)
    assert result.cause == "memory"


@pytest.mark.parametrize(
    "code",
    [
        "import os; os.memfd_create('x')",
        "import ctypes, os; c = ctypes.CDLL(None, use_errno=True)\n"
        "if c.shmget(0, 1 << 30, 0o1600) < 0: raise OSError(ctypes.get_errno(), 'shmget')",
    ],
)
def test_memory_that_belongs_to_no_process_cannot_be_had(sandbox, code):
    result = run(sandbox, code)
    assert result.cause == "error" and "not implemented" in result.stderr + os.strerror(38)
    assert "OSError" in result.stderr


def test_a_folder_full_of_files_ends_at_the_size_of_tmp(sandbox):
    code = """
    for number in range(100):
        open(f"/tmp/{number}", "wb").write(bytes(8 << 20))
    """
    result = run(sandbox, code)
    assert result.cause == "error" and "No space left" in result.stderr
    assert run(sandbox, "import os\nprint(os.listdir('/tmp'))").stdout == "[]\n"


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_gigabyte_of_output_is_cut_off(sandbox, stream):
    result = run(sandbox, f"import sys\nfor _ in range(1024):\n    sys.{stream}.write('x' * (1 << 20))")
    assert result.cause == "output"
    assert len(result.stdout) + len(result.stderr) <= OUTPUT_MB << 20


def test_nothing_can_be_written_outside_tmp(sandbox, tmp_path):
    code = f"""
    import os
    for folder, _, _ in os.walk("/"):
        if folder.startswith(("/proc", "/tmp", "/dev/shm")):
            continue
        try:
            open(os.path.join(folder, "written"), "w").close()
            print(folder)
        except OSError:
            pass
        if folder.count("/") > 3:
            break
    for folder in ("/", "/usr", "/usr/bin", "/etc", "/dev", "/paddock", "/paddock/inside", "/proc", "/proc/sys/kernel"):
        for step in (lambda: open(folder + "/core_pattern", "w"), lambda: os.mkdir(folder + "/made"),
                     lambda: os.chmod(folder, 0o777), lambda: os.rename(folder, folder + "2")):
            try:
                step()
                print(folder)
            except OSError:
                pass
    open({str(tmp_path)!r} + "/written", "w")
    """
    result = run(sandbox, code)
    assert (result.cause, result.stdout) == ("error", "") and "FileNotFoundError" in result.stderr
    assert list(tmp_path.iterdir()) == []
    assert not (ROOT / "paddock/sandbox/inside/written").exists()


def test_the_environment_and_files_of_the_parent_are_not_there(sandbox, tmp_path, monkeypatch):
    (tmp_path / "secret").write_text(SECRET)
    code = f"""
    import os
    def walk(top):
        for folder, _, files in os.walk(top):
            for name in files:
                yield os.path.join(folder, name)
    seen = [repr(dict(os.environ))]
    for name in ("environ", "cmdline", "maps"):
        for process in [{os.getpid()}, {os.getppid()}, *filter(str.isdigit, os.listdir("/proc"))]:
            try:
                seen.append(open(f"/proc/{{process}}/{{name}}", errors="replace").read())
            except OSError:
                pass
    assert not any({SECRET!r} in text or "pytest" in text for text in seen), seen
    for path in ({str(tmp_path / "secret")!r}, {str(Path.home() / ".bashrc")!r}, {__file__!r}, "/etc/shadow"):
        assert not os.path.exists(path), path
    assert os.environ[{SECRET!r}]
    """
    monkeypatch.setenv(SECRET, SECRET)
    with LocalSandbox(replace(LIMITS, isolation=sandbox.isolation)) as fresh:
        result = run(fresh, code)
    assert result.cause == "error" and result.stderr.strip().endswith(f"KeyError: {SECRET!r}")


@pytest.mark.parametrize(
    "code",
    [
        "import socket\nsocket.socket(socket.AF_INET, socket.SOCK_STREAM)",
        "import socket\nsocket.socket(socket.AF_INET6, socket.SOCK_DGRAM)",
        "import socket\nsocket.socket(socket.AF_NETLINK, socket.SOCK_RAW)",
        "import urllib.request\nurllib.request.urlopen('http://127.0.0.1:8000')",
    ],
)
def test_opening_a_socket_is_forbidden(sandbox, code):
    assert run(sandbox, code).cause == "forbidden"


@pytest.mark.parametrize("victim", ["1", "sibling", "os.getppid()"])
def test_ptrace_of_another_process_is_forbidden(sandbox, victim):
    code = f"""
    import ctypes, os, time
    sibling = os.fork()
    if sibling == 0:
        time.sleep(60)
    ctypes.CDLL(None).ptrace(16, {victim}, 0, 0)
    """
    assert run(sandbox, code).cause == "forbidden"


@pytest.mark.parametrize(
    "call",
    [
        "unshare(0x10000000)",
        "mount(b'x', b'/tmp', b'tmpfs', 0, 0)",
        "chroot(b'/tmp')",
        "setns(0, 0)",
        "syscall(321, 0)",
    ],
)
def test_making_namespaces_of_ones_own_is_forbidden(sandbox, call):
    if "syscall" in call and os.uname().machine != "x86_64":
        pytest.skip("the number of bpf on x86-64")
    assert run(sandbox, f"import ctypes\nctypes.CDLL(None).{call}").cause == "forbidden"


def test_a_process_cannot_open_another_ones_memory(sandbox):
    result = run(sandbox, "open('/proc/1/mem', 'rb')")
    assert result.cause == "error" and ("PermissionError" in result.stderr or "FileNotFoundError" in result.stderr)


def test_a_daemon_left_behind_is_found_and_ended(sandbox):
    name = f"pdk{secrets.token_hex(5)}"
    code = f"""
    import ctypes, os, time
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            ctypes.CDLL(None).prctl(15, {name.encode()!r}, 0, 0, 0)
            time.sleep(600)
        os._exit(0)
    os.wait()
    time.sleep(0.1)
    print(42)
    """
    result = run(sandbox, code)
    assert (result.cause, result.stdout) == ("left_running", "42\n")
    assert not result.passed
    assert processes_named(name) == []


def test_children_that_end_with_the_program_are_no_daemons(sandbox):
    code = """
    from concurrent.futures import ProcessPoolExecutor
    if __name__ == "__main__":
        with ProcessPoolExecutor(2) as pool:
            print(sum(pool.map(abs, [-1, -2])))
    """
    assert run(sandbox, code) == replace(run(sandbox, "print(3)"), seconds=pytest.approx(0, abs=LIMITS.timeout))


def test_killing_everything_in_reach_reaches_nobody_else(sandbox):
    code = """
    import os, signal
    for number in (signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM, signal.SIGINT):
        os.kill(1, number)
        try:
            os.kill(-1, number)
        except ProcessLookupError:
            pass
    print(42)
    """
    cell = sandbox._idle.queue[0]
    result = run(sandbox, code)
    assert (result.cause, result.stdout) == ("ok", "42\n")
    for suicide in ("os.kill(os.getpid(), 9)", "os.kill(0, 9)", "os.killpg(os.getpgrp(), 9)", "os.abort()"):
        assert run(sandbox, f"import os\n{suicide}").cause == "killed"
    assert run(sandbox, "import ctypes\nctypes.string_at(0)").cause == "killed"
    assert run(sandbox, "print(1)").passed
    assert sandbox._idle.queue[0] is cell


def test_a_program_finds_nothing_of_the_one_before(sandbox):
    leave = """
    import os
    open("/tmp/left", "w").write("x")
    open("/dev/shm/left", "w").write("x")
    os.environ["LEFT"] = "x"
    import math
    math.left = "x"
    """
    look = """
    import math, os
    print(os.listdir("/tmp"), os.listdir("/dev/shm"), "LEFT" in os.environ, hasattr(math, "left"))
    print(sorted(int(name) for name in os.listdir("/proc") if name.isdigit()) in ([], [1, os.getpid()]))
    """
    assert run(sandbox, leave).passed
    assert run(sandbox, look).stdout == "[] [] False False\nTrue\n"


def test_a_program_has_no_privilege(sandbox):
    code = """
    import os
    status = dict(line.split(":", 1) for line in open("/proc/self/status") if ":" in line)
    print([status[name].strip() for name in ("CapEff", "CapPrm", "CapBnd", "NoNewPrivs", "Seccomp")], os.getuid() == 0)
    """
    if run(sandbox, "import os\nprint(os.listdir('/proc'))").stdout == "[]\n":
        pytest.skip("no /proc can be made within bubblewrap's namespaces for root")
    zeros = ["0" * 16] * 3
    assert run(sandbox, code).stdout == f"{[*zeros, '1', '2']} False\n"


def test_a_cell_goes_when_its_owner_is_killed(tmp_path):
    if not AVAILABLE:
        pytest.skip(f"no isolation works on this machine: {MISSING}")
    code = f"""
import os, threading, time
from paddock.sandbox.local import LocalSandbox
from paddock.sandbox.program import Program, default_settings
from dataclasses import replace
box = LocalSandbox(replace(default_settings(), isolation={AVAILABLE[-1]!r}, timeout=60.0))
if os.fork() == 0:  # a worker that holds a copy of every descriptor
    time.sleep(60)
threading.Thread(target=box.run, args=(Program("while True: pass"),), daemon=True).start()
print("running", flush=True)
time.sleep(60)
"""
    with (tmp_path / "errors").open("w") as errors:
        owner = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=errors, cwd=ROOT)
    assert owner.stdout and owner.stdout.readline() == b"running\n"
    family, end = descendants(owner.pid), time.monotonic() + 10
    while len(family) < 6 and time.monotonic() < end:  # the copy, launcher, zygote, guard, PID 1, program
        family = descendants(owner.pid)
    copy = {child for child in family if not descendants(child) and _command(child) == _command(owner.pid)}
    assert len(family) == 6 and len(copy) == 1, (tmp_path / "errors").read_text()
    owner.kill()
    owner.wait()
    end = time.monotonic() + 5
    while (left := {pid for pid in family - copy if Path(f"/proc/{pid}").exists()}) and time.monotonic() < end:
        time.sleep(0.05)
    for pid in copy:
        os.kill(pid, 9)
    owner.stdout.close()
    assert left == set()


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


@needs_isolation
@pytest.mark.parametrize(
    ("code", "cause"),
    [
        pytest.param("while True: pass", "timeout", id="infinite loop"),
        pytest.param("import os\nwhile True: os.fork()", "processes", id="fork bomb"),
        pytest.param("x = bytearray(10 << 30)", "memory", id="10 GB"),
        pytest.param("while True: print('x' * 1000000)", "output", id="1 GB of output"),
        pytest.param(
            "import signal\nsignal.signal(15, signal.SIG_IGN)\nwhile True: pass", "timeout", id="ignores SIGTERM"
        ),
        pytest.param("open('/usr/bin/evil', 'w')", "error", id="writes outside"),
        pytest.param("import os\nprint(os.environ['HOSTNAME'])", "error", id="reads the environment"),
        pytest.param("import os\nopen(f'/proc/{os.getppid()}/environ').read()", "error", id="reads the parent's"),
        pytest.param("import socket\nsocket.socket()", "forbidden", id="opens a socket"),
        pytest.param("import ctypes\nctypes.CDLL(None).ptrace(16, 1, 0, 0)", "forbidden", id="ptraces"),
        pytest.param(
            "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(99)\nprint(42)",
            "left_running",
            id="leaves a daemon",
        ),
    ],
)
def test_a_hostile_answer_scores_nothing_and_is_counted_by_its_cause(code, cause):
    limits = replace(LIMITS, timeout=LIMIT) if cause == "timeout" else LIMITS
    truth, sandbox = {"inputs": ["1", "2"], "outputs": ["42", "42"]}, limits
    assert contest("```python\nprint(42)\n```", truth, sandbox=sandbox)["score"] == 1.0
    before = descendants(os.getpid())  # the warm cell itself
    start = time.monotonic()
    scored = contest(f"Here you are:\n```python\n{code}\n```", truth, sandbox=sandbox)
    assert time.monotonic() - start < limits.total_timeout
    assert scored["score"] == 0.0 and scored["acc"] is False
    assert [name for name in CAUSES if scored[f"sandbox/{name}"]] == [cause]
    assert descendants(os.getpid()) == before


def test_unsafe_runs_without_isolation_and_still_ends_what_it_started():
    name = f"pdk{secrets.token_hex(5)}"
    daemon = f"""
    import ctypes, os, time
    if os.fork() == 0:
        os.setsid()
        ctypes.CDLL(None).prctl(15, {name.encode()!r}, 0, 0, 0)
        time.sleep(600)
    print(os.getcwd())
    """
    with LocalSandbox(replace(LIMITS, isolation="unsafe")) as box:
        result = box.run(Program(textwrap.dedent(daemon)))
        assert result.cause == "left_running" and processes_named(name) == []
        assert not Path(result.stdout.strip()).exists()
        assert box.run(Program("while True: pass"), LIMIT).cause == "timeout"
        assert box.run(Program("x = bytearray(10 << 30)")).cause == "memory"
        assert box.run(Program("import os; os.kill(os.getppid(), 9)"), LIMIT).cause == "killed"
        guard = "open(f'/proc/{os.getppid()}/stat').read().split()[3]"
        assert box.run(Program(f"import os; os.kill(int({guard}), 9)"), LIMIT).cause == "killed"
        assert box.run(Program("print(42)")).stdout == "42\n"


WITHOUT_NAMESPACES = """
import ctypes, sys
from dataclasses import replace
from paddock.sandbox.inside import kernel, seccomp
from paddock.sandbox.local import LocalSandbox
from paddock.sandbox.program import Program, default_settings
DENIED = 0x00050001  # EPERM, as a container's own filter says it
number = seccomp.NUMBERS[__import__("os").uname().machine]["unshare"]
test = [seccomp._word(seccomp.LOAD, seccomp.FIRST_ARGUMENT), *seccomp._when(seccomp.ANY_BIT, FLAGS, DENIED),
        seccomp._word(seccomp.RETURN, seccomp.ALLOW)]
code = [seccomp._word(seccomp.LOAD, seccomp.NUMBER), seccomp._word(seccomp.EQUAL, number, 0, len(test)), *test,
        seccomp._word(seccomp.RETURN, seccomp.ALLOW)]
kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
kernel.install_filter(b"".join(code))
with LocalSandbox(replace(default_settings(), isolation=sys.argv[1])) as box:
    for _ in range(2):
        result = box.run(Program("import os; print(os.listdir('/tmp')); open('/tmp/left', 'w')"))
        print(result.cause, box._idle.queue[0] is None)
        print(result.stdout)
"""


def without(flags: str, isolation: str) -> subprocess.CompletedProcess[str]:
    code = WITHOUT_NAMESPACES.replace("FLAGS", flags)
    return subprocess.run(
        [sys.executable, "-c", code, isolation], cwd=ROOT, capture_output=True, text=True, timeout=60,
        env={**os.environ, "PATH": "/nowhere"},
    )  # fmt: skip


def test_where_nothing_isolates_the_run_is_refused_with_the_reason():
    """The filter that containers have by default, put on a real process."""
    done = without("0xFFFFFFFF", "auto")
    assert done.returncode == 1
    error = done.stderr.strip().splitlines()
    assert "bubblewrap: bwrap is not installed; unshare: unshare: Operation not permitted" in error[-2]
    assert "reward_model.sandbox.isolation=auto" in error[-2]
    assert "reward_model.sandbox_fusion.url" in error[-1] and "reward_model.sandbox.isolation=unsafe" in error[-1]
    assert without("0xFFFFFFFF", "unsafe").stdout.startswith("ok True")


@needs_root
def test_where_namespaces_cannot_be_nested_every_program_has_a_cell_of_its_own():
    if MISSING["unshare"]:
        pytest.skip(MISSING["unshare"])
    done = without("0x10000000", "unshare")
    assert done.stdout == "ok True\n[]\n\n" * 2, done.stderr


def test_bubblewrap_that_is_not_there_and_a_folder_that_is_not_there_are_named(monkeypatch):
    for isolation in AVAILABLE:
        with pytest.raises(UserError, match="/nowhere, which programs shall be able to read, is not there"):
            LocalSandbox(replace(LIMITS, isolation=isolation, readable=("/nowhere",)))
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(UserError, match="bwrap is not installed"):
        LocalSandbox(replace(LIMITS, isolation="bubblewrap"))


@needs_isolation
def test_any_command_can_run_the_program_and_further_folders_be_read(tmp_path):
    (tmp_path / "word").write_text("hello")
    tmp_path.chmod(0o755)  # root's programs run as nobody
    settings = replace(LIMITS, isolation=AVAILABLE[0], command=("sh", "{file}"), readable=(str(tmp_path),))
    with LocalSandbox(settings) as box:
        assert box.run(Program(f'read name; cat {tmp_path}/word; echo " $name"', stdin="you\n")).stdout == "hello you\n"
        assert box.run(Program(f"echo x > {tmp_path}/written")).cause == "error"
        assert box.run(Program("sleep 60"), LIMIT).cause == "timeout"
        assert box.run(Program("exit 3")).cause == "error"
    assert [path.name for path in tmp_path.iterdir()] == ["word"]


@needs_isolation
def test_programs_run_side_by_side_and_in_order():
    with LocalSandbox(LIMITS, size=3) as box:
        start = time.monotonic()
        results = box.run_all([Program(f"import time\ntime.sleep(0.5)\nprint({number})") for number in range(6)])
        assert [result.stdout for result in results] == [f"{number}\n" for number in range(6)]
        assert time.monotonic() - start < 2.9  # 3 s one after the other
    assert box.run(Program("print(1)")).passed  # a box that was closed begins anew
    box.close()


@needs_isolation
def test_programs_side_by_side_see_nothing_of_each_other():
    stays = """
    import os, socket, time
    open("/tmp/mine", "w")
    open("/dev/shm/mine", "w")
    listener = socket.socket(socket.AF_UNIX)
    listener.bind("\\0mine")
    listener.listen()
    print(os.fork() and 1)
    time.sleep(1)
    """
    looks = """
    import os, socket, time
    time.sleep(0.5)
    print(os.listdir("/tmp"), os.listdir("/dev/shm"), len([name for name in os.listdir("/proc") if name.isdigit()]) < 3)
    try:
        socket.socket(socket.AF_UNIX).connect("\\0mine")
    except ConnectionRefusedError:
        print("refused")
    """
    with LocalSandbox(LIMITS, size=2) as box:
        first, second = box.run_all([Program(textwrap.dedent(code)) for code in (stays, looks)])
    assert (first.cause, second.cause) == ("ok", "ok")
    assert second.stdout == "[] [] True\nrefused\n"

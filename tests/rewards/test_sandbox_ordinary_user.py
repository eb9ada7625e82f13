"""An ordinary user gets the isolation that root gets; where nobody can have it, training does not begin."""

from __future__ import annotations

import subprocess

import ordinary_account
import pytest
from test_sandbox import MISSING, needs_root

from tests.forked import ForkedCall

RUN = """
import getpass, os, sys
from dataclasses import replace
from paddock.sandbox.local import LocalSandbox
from paddock.sandbox.program import Program, SandboxSettings
settings = SandboxSettings(isolation=sys.argv[1], timeout=1.0, total_timeout=20.0, processes=16, memory_limit_mb=256,
                    command=(), readable=(), url=None, max_concurrent=1)
SOCKETS = '''
import socket
listener = socket.socket(socket.AF_UNIX)
listener.bind("\\\\0x")
listener.listen(4096)
while True:
    caller = socket.socket(socket.AF_UNIX)
    caller.connect("\\\\0x")
    caller.setblocking(False)
    try:
        while True:
            caller.send(bytes(65536))
    except BlockingIOError:
        caller.close()
'''
FORKS = '''
import os, time
for _ in range(8):
    if os.fork() == 0:
        x = b"x" * (100 << 20)
        time.sleep(99)
time.sleep(99)
'''
OWN = '''
class P:
    def __init__(self, x):
        self.x = x
    def __eq__(self, other):
        return self.x == other.x
'''
print(getpass.getuser(), os.geteuid())
with LocalSandbox(settings) as box:
    for code in ("while True: pass", "import os\\nwhile True: os.fork()", "x = bytearray(10 << 30)",
                 "open('/usr/x', 'w')", "while True: print('x' * 1000000)", "import socket; socket.socket()",
                 "import os; os.kill(0, 9)", "print(42)"):
        print(box.run(Program(code)).cause)
    with LocalSandbox(replace(settings, timeout=9.0)) as slow:  # a busy machine takes its time to fill memory
        for code in (SOCKETS, FORKS):
            print(slow.run(Program(code)).cause)
    print(box.run(Program("import resource; resource.prlimit(1, resource.RLIMIT_FSIZE, (5, 5))")).cause)
    print(box.run(Program(OWN, checks=("assert P(1) == P(1)", "assert P(2).x == 2"))).cause)
    print("watch" in box.guard)
"""
CAUSES = [
    "timeout",
    "processes",
    "memory",
    "error",
    "output",
    "forbidden",
    "killed",
    "ok",
    "memory",
    "memory",
    "error",
    "ok",
]


@needs_root
@pytest.mark.parametrize("isolation", list(MISSING))
@pytest.mark.parametrize("hidden", ["", pytest.param("/proc/tty", marks=pytest.mark.slow)])
def test_an_ordinary_account_gets_the_same_isolation(isolation, hidden):
    """Also in a container, where parts of /proc are hidden: the kernel allows no other, and memory is counted by it."""
    if MISSING[isolation]:
        pytest.skip(MISSING[isolation])
    command = ordinary_account.command("-c", RUN, isolation, hidden=hidden)
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if "Operation not permitted" in done.stderr or "Permission denied" in done.stderr:
        pytest.skip(f"ordinary users have no namespaces here: {done.stderr.splitlines()[-2:]}")
    assert done.stdout.split() == [ordinary_account.NAME, str(ordinary_account.NUMBER), *CAUSES, "True"], done.stderr


REFUSED = """
import os
from paddock.sandbox.inside import kernel, seccomp
number = seccomp.NUMBERS[os.uname().machine]["unshare"]
code = [seccomp._word(seccomp.LOAD, seccomp.NUMBER), *seccomp._when(seccomp.EQUAL, number, seccomp.REFUSAL),
        seccomp._word(seccomp.RETURN, seccomp.ALLOW)]
kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
kernel.install_filter(b"".join(code))
os.environ["PATH"] = "/nowhere"
from paddock.loading.load import load
from paddock.errors import UserError
from paddock.trainer.assembly import open_rewards
from paddock.rewards.score import ScoreRequest
truth = {"inputs": ["1"], "outputs": ["1"]}
with open_rewards(load([]).config) as rewards:
    try:
        rewards.check([ScoreRequest("apps", "", truth)])
    except UserError as error:
        print(error.key, error.value)
        print(error)
"""


def test_training_does_not_begin_where_nothing_isolates():
    process = ForkedCall(lambda: exec(REFUSED, {"__name__": "__main__"}))
    assert process.wait() == 0, process.said()
    lines = process.said().splitlines()
    first = lines.index("reward_model.sandbox.isolation auto")
    rest = lines[first + 1 :]
    text = "\n".join(rest)
    assert "unshare: Operation not permitted" in text and "bwrap is not installed" in text
    assert "reward_model.sandbox_fusion.url" in text and "reward_model.sandbox.isolation=unsafe" in text

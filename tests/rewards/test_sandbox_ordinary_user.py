"""The walls that root builds, an ordinary user builds too."""

from __future__ import annotations

import subprocess
import sys

import pytest
from conftest import ROOT
from test_sandbox import MISSING, needs_root

ORDINARY = 65534
AS_ORDINARY = """
import os, sys
sys.path.insert(0, sys.argv[1])
from paddock.rewards.sandbox.local import LocalSandbox
from paddock.rewards.sandbox.program import Program, Settings
settings = Settings(isolation=sys.argv[2], timeout=1.0, total_timeout=20.0, processes=16, memory_limit_mb=256,
                    command=(), readable=(), url=None, max_concurrent=1)
print(os.geteuid())
with LocalSandbox(settings) as box:
    for code in ("while True: pass", "import os\\nwhile True: os.fork()", "x = bytearray(10 << 30)",
                 "open('/usr/x', 'w')", "while True: print('x' * 1000000)", "import socket; socket.socket()",
                 "import os; os.kill(0, 9)", "print(42)"):
        print(box.run(Program(code)).cause)
"""


@needs_root
@pytest.mark.parametrize("isolation", list(MISSING))
def test_an_ordinary_user_gets_the_same_walls(isolation):
    """With an interpreter that this user can reach: root's own may lie in root's home."""
    if MISSING[isolation]:
        pytest.skip(MISSING[isolation])
    python = next((path for path in (sys.executable, "/usr/bin/python3") if _reachable(path)), None)
    if python is None:
        pytest.skip("no Python 3.11 that an ordinary user can start")
    done = subprocess.run(
        [python, "-B", "-c", AS_ORDINARY, str(ROOT), isolation],
        user=ORDINARY, group=ORDINARY, extra_groups=[], capture_output=True, text=True, cwd="/", timeout=60,
    )  # fmt: skip
    if "Operation not permitted" in done.stderr or "Permission denied" in done.stderr:
        pytest.skip(f"ordinary users have no namespaces here: {done.stderr.splitlines()[-2:]}")
    causes = ["timeout", "processes", "memory", "error", "output", "forbidden", "killed", "ok"]
    assert done.stdout.split() == [str(ORDINARY), *causes], done.stderr


def _reachable(python: str) -> bool:
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import paddock.errors; sys.exit(sys.version_info < (3, 11))"
    try:
        done = subprocess.run([python, "-c", code], user=ORDINARY, group=ORDINARY, capture_output=True, cwd="/")
        return done.returncode == 0
    except OSError:
        return False

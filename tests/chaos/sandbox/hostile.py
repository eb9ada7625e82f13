"""Programs that want out, want the machine's time, or want the end of whoever watches them."""

# ruff: noqa: E501 - programs are texts

from __future__ import annotations

from .catalogue import Case, function, script
from .cheats import CHEATS
from .memory import MEMORY

LIBC = "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\n"
ANSWERS = "print(int(input()) + 1)"


def call(name: str, text: str) -> Case:
    return script("walls", name, f"{LIBC}{text}\n{ANSWERS}")


def reach(name: str, text: str) -> Case:
    """Tries this on every process it can name, and answers afterwards."""
    body = "\n    ".join(text.splitlines())
    return script("guardian", name, f"import os, resource, signal\nfor pid in (1, os.getppid(), 2, 3, os.getpid() - 1):\n"
                  f"  try:\n    {body}\n  except Exception:\n    pass\n{ANSWERS}")  # fmt: skip


def asked(name: str, body: str) -> Case:
    return function("report", name, f"import os, sys\ndef f(x):\n    {body}\n    return x + 1", 'def f(x):\n    """One more."""\n',
                    "f", "def check(candidate):\n    assert candidate(1) == 2\n")  # fmt: skip


TIME = [
    script("time", "a loop without end", "while True:\n    pass"),
    script("time", "sleeps", "import time\ntime.sleep(1000)"),
    script("time", "ignores every signal", "import signal, time\nfor n in signal.valid_signals() - {9, 19}:\n"
           "    signal.signal(n, signal.SIG_IGN)\nwhile True:\n    time.sleep(1)"),
    script("time", "a regular expression that explodes", "import re\nre.match('(a+)+b', 'a' * 60)"),
    script("time", "a power that explodes", "x = 10 ** 10 ** 10"),
    script("time", "waits for input that never comes", "import sys\nsys.stdin.read()\nimport select\nselect.select([], [], [])"),
    script("time", "waits for itself", "import threading\nl = threading.Lock()\nl.acquire()\nl.acquire()"),
    script("time", "stops itself", "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)"),
    script("time", "never ends at its end", "import atexit, time\natexit.register(time.sleep, 1000)\nprint(42)"),
    script("time", "a thread that never ends", "import threading, time\nthreading.Thread(target=time.sleep, args=(1000,)).start()"),
    script("time", "deep recursion", "import sys\nsys.setrecursionlimit(10 ** 9)\ndef f():\n    f()\nf()"),
    script("time", "a source that the compiler chokes on", "x = " + "(" * 5000 + ")" * 5000),
    script("time", "a source of one expression", "x = " + "+".join(["1"] * 20000)),
    asked("takes forever to answer", "while True: pass"),
    asked("answers byte by byte", "import time\n    while True:\n        os.write(3, b' ')\n        time.sleep(0.01)"),
]  # fmt: skip
PROCESSES = [
    script("processes", "a fork bomb", "import os\nwhile True:\n    os.fork()"),
    script("processes", "a fork bomb that hides errors", "import os\nwhile True:\n    try:\n        os.fork()\n"
           "    except OSError:\n        pass"),
    script("processes", "a bomb of threads", "import threading, time\nwhile True:\n"
           "    threading.Thread(target=time.sleep, args=(99,)).start()"),
    script("processes", "a daemon that stays", "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(600)\n"
           "print(42)", cheat=True),
    script("processes", "a daemon of a daemon", "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n"
           "        time.sleep(600)\n    os._exit(0)\nos.wait()\nprint(42)", cheat=True),
    script("processes", "zombies", "import os\nfor _ in range(1000):\n    if os.fork() == 0:\n        os._exit(0)"),
    script("processes", "a shell that forks", "import subprocess\nsubprocess.run(['sh', '-c', ':(){ :|:& };:'])"),
]  # fmt: skip
OUTPUT = [
    script("output", "a gigabyte of output", "while True:\n    print('x' * 1000000)"),
    script("output", "a gigabyte of errors", "import sys\nwhile True:\n    sys.stderr.write('x' * 1000000)"),
    script("output", "millions of words", "print('1 ' * (7 << 20))"),
    script("output", "millions of lines", "print('1\\n' * (7 << 20))"),
    script("output", "bytes that are no text", "import os\nwhile True:\n    os.write(1, bytes(range(256)) * 4096)"),
    script("output", "output and input grow", "import os\nwhile True:\n    os.write(0, bytes(1 << 20))\n    os.write(1, bytes(1 << 20))"),
    script("output", "its output is a hole", "import os\nos.ftruncate(1, 1 << 40)"),
    script("output", "its output is sealed", "import fcntl\nfcntl.fcntl(1, 1033, 15)\nprint(42)"),
]  # fmt: skip
SIGNALS = [
    script("guardian", f"ends itself by signal {number}", f"import os\nos.kill(os.getpid(), {number})")
    for number in (1, 3, 6, 7, 8, 9, 11, 13, 15, 31, 34, 40, 64)
]
GUARDIAN = [
    reach("kills", "for n in (9, 19, 15, 2, 1, 40): os.kill(pid, n)"),
    reach("limits the size of files", "resource.prlimit(pid, resource.RLIMIT_FSIZE, (10, 10))"),
    reach("limits the time", "resource.prlimit(pid, resource.RLIMIT_CPU, (0, 0))"),
    reach("limits open files", "resource.prlimit(pid, resource.RLIMIT_NOFILE, (0, 0))"),
    reach("limits memory", "resource.prlimit(pid, resource.RLIMIT_AS, (0, 0))"),
    reach("limits processes", "resource.prlimit(pid, resource.RLIMIT_NPROC, (0, 0))"),
    reach("starves", "os.sched_setscheduler(pid, os.SCHED_IDLE, os.sched_param(0))"),
    reach("binds to a processor", "os.sched_setaffinity(pid, [0])"),
    reach("makes nice", "os.setpriority(os.PRIO_PROCESS, pid, 19)\nos.setpriority(os.PRIO_USER, 0, 19)"),
    reach("opens the memory", "open(f'/proc/{pid}/mem', 'r+b').write(b'x')"),
    reach("opens the files", "[open(f'/proc/{pid}/fd/{n}', 'r+b') for n in os.listdir(f'/proc/{pid}/fd')]"),
    reach("asks the kernel to end it first", "open(f'/proc/{pid}/oom_score_adj', 'w').write('1000')"),
    reach("traces", "import ctypes\nctypes.CDLL(None).ptrace(16, pid, 0, 0)"),
    reach("reads the memory by a call", "import ctypes\nctypes.CDLL(None).process_vm_readv(pid, 0, 0, 0, 0, 0)"),
    reach("takes an open file", "import ctypes\nctypes.CDLL(None).syscall(438, os.pidfd_open(pid), 1, 0)"),
    reach("signals by a descriptor", "signal.pidfd_send_signal(os.pidfd_open(pid), 9)"),
    script("guardian", "kills everything", f"import os, signal\nfor n in (9, 19):\n    try:\n        os.kill(-1, n)\n"
           f"    except OSError:\n        pass\n{ANSWERS}"),
    script("guardian", "kills its group", "import os\nos.killpg(0, 9)"),
    *SIGNALS,
]  # fmt: skip
REPORT = [
    asked("answers with a hundred megabytes", "return 'x' * (100 << 20)"),
    asked("answers with a list of millions", "return list(range(20_000_000))"),
    asked("answers with itself", "y = []; y.append(y); return y"),
    asked("answers with a nest", "y = []\n    for _ in range(100000): y = [y]\n    return y"),
    asked("answers with a huge number", "return 7 ** 2000000"),
    asked("answers with a generator without end", "return iter(int, 1)"),
    asked("answers with what cannot be written", "return type('X', (), {'__class__': property(lambda s: 1 / 0)})()"),
    asked("raises a text of a hundred megabytes", "raise ValueError('x' * (100 << 20))"),
    asked("raises an error whose text raises", "raise type('E', (Exception,), {'__str__': lambda s: 1 / 0})()"),
    asked("writes over the line", "os.write(3, b'\\xff' * 1000)"),
    asked("closes the line", "os.close(3)"),
    asked("gives the line to a child", "os.fork() or os.write(3, b'[\"value\", 2]\\n')"),
    asked("reads the questions away", "os.read(3, 1)"),
    asked("dies while it answers", "os.write(3, b'[\"value\"'); os._exit(0)"),
    asked("a signal while it answers", "os.write(3, b'[\"value\"'); os.kill(os.getpid(), 40)"),
    asked("a text with half characters", "return '\\ud800' * 100"),
    asked("names without end", "globals().update({f'n{i}': 0 for i in range(10 ** 6)})"),
]
WALLS = [
    call("a namespace of its own", "libc.unshare(0x10000000)"),
    call("a mount", "libc.mount(b'x', b'/tmp', b'tmpfs', 0, 0)"),
    call("a new root", "libc.chroot(b'/tmp')"),
    call("another namespace", "libc.setns(0, 0)"),
    call("a program for the kernel", "libc.syscall(321, 0)"),
    call("a module for the kernel", "libc.syscall(313, 0, b'', 0)"),
    call("a child in namespaces of its own", "libc.syscall(56, 0x7E020011, 0, 0, 0, 0)"),
    call("a call of 32 bits", "libc.syscall(0x40000000 | 39)"),
    call("the clock", "libc.syscall(227, 0, bytes(16))"),
    call("a restart of the machine", "libc.syscall(169, 0xfee1dead, 672274793, 0x1234567, 0)"),
    script("walls", "a socket to the network", "import socket\nsocket.socket().connect(('127.0.0.1', 80))"),
    script("walls", "a socket to another machine", "import urllib.request\nurllib.request.urlopen('http://192.0.2.1', timeout=1)"),
    script("walls", "files of the system", f"import os\nfor p in ('/etc/shadow', '/root/.ssh/id_rsa', '/proc/1/environ'):\n"
           f"    try:\n        print(open(p).read())\n    except OSError:\n        pass\n{ANSWERS}"),
    script("walls", "writes everywhere", f"import os\nfor d in ('/', '/usr', '/usr/bin', '/etc', '/dev', '/proc', '/paddock/inside'):\n"
           f"    try:\n        open(d + '/x', 'w')\n    except OSError:\n        pass\n{ANSWERS}"),
    script("walls", "settings of the kernel", f"for n in ('core_pattern', 'hostname', 'panic'):\n    try:\n"
           f"        open('/proc/sys/kernel/' + n, 'w').write('x')\n    except OSError:\n        pass\n{ANSWERS}"),
    script("walls", "privileges by a program", f"import subprocess\nsubprocess.run(['su', '-c', 'true'], stdin=-3)\n{ANSWERS}"),
    script("walls", "a device", f"import os\ntry:\n    os.mknod('/tmp/sda', 0o60600, os.makedev(8, 0))\nexcept OSError:\n"
           f"    pass\n{ANSWERS}"),
]  # fmt: skip
TEXTS = [
    Case("text", name, "apps", answer, {"inputs": ["41\n"], "outputs": ["42\n"]})
    for name, answer in {
        "nothing": "",
        "half characters": "```python\nprint('\ud800')\n```",
        "zero bytes": "```python\nprint(1)\0\n```",
        "thousands of fences": "```python\nx\n" * 20000,
        "a megabyte of one line": "```python\n" + "x = 1;" * 150000 + "\n```",
        "separators of other languages": "```python\u2028print(42)\u2029```\x85",
    }.items()
]
HOSTILE = [*MEMORY, *TIME, *PROCESSES, *OUTPUT, *GUARDIAN, *REPORT, *WALLS, *TEXTS, *CHEATS]

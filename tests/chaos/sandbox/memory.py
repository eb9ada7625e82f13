"""Programs that make the machine hold memory for them: their own, and above all the kernel's.

Each goes on until something stops it. None must take more of the machine than the limit and a tenth.
"""

from __future__ import annotations

from .catalogue import Case, script

LIBC = "import ctypes, os, time\nlibc = ctypes.CDLL(None, use_errno=True)\n"
FORKED = "import os, time\nfor _ in range(14):\n    if os.fork() == 0:\n        break\n"


def memory(name: str, code: str, before: str = "") -> Case:
    from textwrap import dedent

    return script("memory", name, before + dedent(code).strip())


MEMORY = [
    memory("one large block", "x = bytearray(10 << 30)"),
    memory("blocks of a megabyte", "x = []\nwhile True:\n    x.append(bytes(1 << 20))"),
    memory("a list that doubles", "x = [0]\nwhile True:\n    x += x"),
    memory("a text that doubles", "x = 'ab'\nwhile True:\n    x += x"),
    memory("a number that is squared", "x = 3\nwhile True:\n    x *= x"),
    memory("a dictionary without end", "d = {}\ni = 0\nwhile True:\n    d[i] = [i]\n    i += 1"),
    memory("objects that hold each other", "a = None\nwhile True:\n    a = [a, bytearray(1000)]"),
    memory("small maps without end", """
        import mmap
        maps = []
        while True:
            maps.append(mmap.mmap(-1, 4096, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
            maps[-1][0] = 1
        """),
    memory("fourteen processes fill a block each", FORKED + "x = []\nwhile True:\n    x.append(bytearray(1 << 20))"),
    memory("fourteen processes fill at once", FORKED + "x = bytearray(200 << 20)\ntime.sleep(60)"),
    memory("a chain of processes, each with a block", """
        import os, time
        blocks = []
        while True:
            blocks.append(os.urandom(8 << 20))
            if os.fork():
                time.sleep(60)
        """),
    memory("processes that copy what they share", """
        import os, time
        shared = bytearray(120 << 20)
        for _ in range(14):
            if os.fork() == 0:
                for place in range(0, len(shared), 4096):
                    shared[place] = 1
                time.sleep(60)
        time.sleep(60)
        """),
    memory("unix stream pairs full of bytes", """
        import socket, time
        pairs = []
        try:
            while True:
                pairs.append(socket.socketpair())
                for one in pairs[-1]:
                    one.setblocking(False)
                    try:
                        while True:
                            one.send(bytes(1 << 16))
                    except BlockingIOError:
                        pass
        except OSError:
            time.sleep(60)
        """),
    memory("unix stream pairs with large buffers", """
        import socket, time
        pairs = []
        try:
            while True:
                pairs.append(socket.socketpair())
                for one in pairs[-1]:
                    try:
                        one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 30)
                    except OSError:
                        pass
                    one.setblocking(False)
                    try:
                        while True:
                            one.send(bytes(1 << 20))
                    except BlockingIOError:
                        pass
        except OSError:
            time.sleep(60)
        """),
    memory("fourteen processes with unix stream pairs", FORKED + """
import socket
pairs = []
try:
    while True:
        pairs.append(socket.socketpair())
        for one in pairs[-1]:
            one.setblocking(False)
            try:
                while True:
                    one.send(bytes(1 << 16))
            except BlockingIOError:
                pass
except OSError:
    time.sleep(60)
"""),
    memory("connections that nobody accepts", """
        import socket
        listeners = []
        number = 0
        while True:
            number += 1
            listener = socket.socket(socket.AF_UNIX)
            listener.bind(f"\\0listener{number}")
            listener.listen(4096)
            listeners.append(listener)
            for _ in range(4000):
                caller = socket.socket(socket.AF_UNIX)
                caller.connect(f"\\0listener{number}")
                caller.setblocking(False)
                try:
                    while True:
                        caller.send(bytes(1 << 16))
                except BlockingIOError:
                    pass
                caller.close()
        """),
    memory("connections of fourteen processes that nobody accepts", FORKED + """
import socket
number = 0
listeners = []
while True:
    number += 1
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"\\0listener{os.getpid()}.{number}")
    listener.listen(4096)
    listeners.append(listener)
    for _ in range(4000):
        caller = socket.socket(socket.AF_UNIX)
        caller.connect(f"\\0listener{os.getpid()}.{number}")
        caller.setblocking(False)
        try:
            while True:
                caller.send(bytes(1 << 16))
        except BlockingIOError:
            pass
        caller.close()
"""),
    memory("datagrams that nobody reads", """
        import socket, time
        inboxes = []
        try:
            while True:
                inbox = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
                inbox.bind(f"\\0inbox{len(inboxes)}")
                inboxes.append(inbox)
                for _ in range(12):
                    sender = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
                    sender.setblocking(False)
                    try:
                        sender.sendto(bytes(200_000), f"\\0inbox{len(inboxes) - 1}")
                    except OSError:
                        pass
                    sender.close()
        except OSError:
            time.sleep(60)
        """),
    memory("sockets in flight inside sockets", """
        import socket, time
        while True:
            a, b = socket.socketpair()
            c, d = socket.socketpair()
            for one in (a, b, c, d):
                one.setblocking(False)
            try:
                while True:
                    c.send(bytes(1 << 16))
            except BlockingIOError:
                pass
            socket.send_fds(a, [b"x"], [b.fileno(), c.fileno(), d.fileno()])
            for one in (a, b, c, d):
                one.close()
        """),
    memory("pages spliced into sockets byte by byte", """
        import os, socket, time
        file = os.open("/tmp/pages", os.O_RDWR | os.O_CREAT)
        os.write(file, os.urandom(8 << 20))
        pairs = []
        while True:
            pairs.append(socket.socketpair())
            pairs[-1][0].setblocking(False)
            try:
                for page in range(10_000):
                    os.sendfile(pairs[-1][0].fileno(), file, page * 4096, 1)
            except BlockingIOError:
                pass
        """),
    memory("huge pages held by pipes", LIBC + """
class Vector(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]
libc.mmap.restype = ctypes.c_void_p
pipes = []
while True:
    read, write = os.pipe()
    pipes.append((read, write))
    for _ in range(16):
        size = 4 << 20
        block = libc.mmap(None, ctypes.c_size_t(size), 3, 0x22, -1, ctypes.c_long(0))
        block = (block + (2 << 20) - 1) & ~((2 << 20) - 1)
        libc.madvise(ctypes.c_void_p(block), ctypes.c_size_t(2 << 20), 14)
        ctypes.memset(block, 1, 2 << 20)
        vector = Vector(block, 1)
        if libc.vmsplice(write, ctypes.byref(vector), 1, 0) < 0:
            raise OSError(ctypes.get_errno(), "vmsplice")
        libc.munmap(ctypes.c_void_p(block), ctypes.c_size_t(2 << 20))
"""),
    memory("pipes full of bytes", """
        import os, time
        pipes = []
        try:
            while True:
                pipes.append(os.pipe())
                os.set_blocking(pipes[-1][1], False)
                try:
                    while True:
                        os.write(pipes[-1][1], bytes(65536))
                except BlockingIOError:
                    pass
        except OSError:
            time.sleep(60)
        """),
    memory("pipes of a megabyte", """
        import fcntl, os, time
        pipes = []
        try:
            while True:
                pipes.append(os.pipe())
                fcntl.fcntl(pipes[-1][1], 1031, 1 << 20)
                os.set_blocking(pipes[-1][1], False)
                try:
                    while True:
                        os.write(pipes[-1][1], bytes(65536))
                except BlockingIOError:
                    pass
        except BlockingIOError:
            time.sleep(60)
        """),
    memory("pipes of fourteen processes", FORKED + """
pipes = []
try:
    while True:
        pipes.append(os.pipe())
        os.set_blocking(pipes[-1][1], False)
        try:
            while True:
                os.write(pipes[-1][1], bytes(65536))
        except BlockingIOError:
            pass
except OSError:
    time.sleep(60)
"""),
    memory("named pipes without a name", """
        import os, time
        pipes = []
        try:
            while True:
                os.mkfifo("/tmp/fifo")
                pipes.append(os.open("/tmp/fifo", os.O_RDWR | os.O_NONBLOCK))
                os.unlink("/tmp/fifo")
                try:
                    while True:
                        os.write(pipes[-1], bytes(65536))
                except BlockingIOError:
                    pass
        except OSError:
            time.sleep(60)
        """),
    memory("a file without a name", LIBC + "f = os.memfd_create('x')\nwhile os.write(f, bytes(1 << 20)):\n    pass"),
    memory("a secret file", LIBC + "f = libc.syscall(447, 0)\nos.ftruncate(f, 1 << 30)"),
    memory("files in /tmp", """
        number = 0
        while True:
            open(f"/tmp/{number}", "wb").write(bytes(8 << 20))
            number += 1
        """),
    memory("files in /dev/shm and a heap beside", """
        import os, time
        kept = []
        for folder in ("/tmp", "/dev/shm"):
            try:
                for number in range(100):
                    with open(f"{folder}/{number}", "wb") as file:
                        file.write(os.urandom(4 << 20))
            except OSError:
                pass
        while True:
            kept.append(os.urandom(1 << 20))
        """),
    memory("files that are open and have no name", """
        import os
        files = []
        while True:
            file = open("/tmp/x", "wb")
            os.unlink("/tmp/x")
            file.write(os.urandom(4 << 20))
            files.append(file)
        """),
    memory("thousands of small files", """
        import os
        number = 0
        while True:
            os.makedirs(f"/dev/shm/{number}", exist_ok=True)
            for _ in range(1000):
                number += 1
                os.close(os.open(f"/dev/shm/{'x' * 200}{number}", os.O_CREAT | os.O_WRONLY))
        """),
    memory("names and attributes of files", """
        import os
        number = 0
        while True:
            number += 1
            os.symlink("x" * 4000, f"/tmp/{number}")
            try:
                os.setxattr(f"/tmp/{number}", "user.x", bytes(60_000), follow_symlinks=False)
            except OSError:
                pass
        """),
    memory("output, errors and input together", """
        import os, time
        for stream in (0, 1, 2):
            try:
                for _ in range(15):
                    os.write(stream, bytes(1 << 20))
            except OSError:
                pass
        kept = []
        while True:
            kept.append(os.urandom(1 << 20))
        """),
    memory("shared memory of System V", LIBC + """
while True:
    number = libc.shmget(0, 64 << 20, 0o1600)
    if number < 0:
        raise OSError(ctypes.get_errno(), "shmget")
"""),
    memory("queues of messages", LIBC + """
queue = libc.msgget(0, 0o1600)
if queue < 0:
    raise OSError(ctypes.get_errno(), "msgget")
"""),
    memory("queues of messages with names", LIBC + """
queue = libc.mq_open(b"/queue", os.O_CREAT | os.O_RDWR, 0o600, None)
if queue < 0:
    raise OSError(ctypes.get_errno(), "mq_open")
"""),
    memory("semaphores", LIBC + """
while True:
    if libc.semget(0, 32000, 0o1600) < 0:
        raise OSError(ctypes.get_errno(), "semget")
"""),
    memory("a shared map that keeps its pages", """
        import ctypes, mmap
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        size = 64 << 20
        while True:
            block = libc.mmap(None, ctypes.c_size_t(size), 3, 0x21, -1, ctypes.c_long(0))
            if block in (None, ctypes.c_void_p(-1).value):
                raise OSError(ctypes.get_errno(), "mmap")
            ctypes.memset(block, 1, size)
            libc.munmap(ctypes.c_void_p(block + 4096), ctypes.c_size_t(size - 4096))
        """),
    memory("a shared map of zeros", """
        import ctypes, os
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        zeros = os.open("/dev/zero", os.O_RDWR)
        size = 64 << 20
        while True:
            block = libc.mmap(None, ctypes.c_size_t(size), 3, 1, zeros, ctypes.c_long(0))
            if block in (None, ctypes.c_void_p(-1).value):
                raise OSError(ctypes.get_errno(), "mmap")
            ctypes.memset(block, 1, size)
            libc.munmap(ctypes.c_void_p(block + 4096), ctypes.c_size_t(size - 4096))
        """),
    memory("a shared map that says it is not needed", """
        import mmap, os, time
        for _ in range(14):
            if os.fork() == 0:
                block = mmap.mmap(-1, 200 << 20)
                for place in range(0, len(block), 4096):
                    block[place] = 1
                block.madvise(mmap.MADV_DONTNEED)
                time.sleep(60)
        time.sleep(60)
        """),
    memory("page tables of scattered maps", LIBC + FORKED + """
libc.mmap.restype = ctypes.c_void_p
address = 1 << 33
while address < 1 << 46:
    block = libc.mmap(ctypes.c_void_p(address), ctypes.c_size_t(4096), 3, 0x100022, -1, ctypes.c_long(0))
    if block == address:
        ctypes.memset(address, 1, 1)
    address += 1 << 30
time.sleep(60)
"""),
    memory("page tables of maps that are only read", LIBC + FORKED + """
libc.mmap.restype = ctypes.c_void_p
address = 1 << 33
total = 0
while address < 1 << 46:
    block = libc.mmap(ctypes.c_void_p(address), ctypes.c_size_t(4096), 1, 0x100022, -1, ctypes.c_long(0))
    if block == address:
        total += ctypes.string_at(address, 1)[0]
    address += 1 << 30
time.sleep(60)
"""),
    memory("thousands of maps in fourteen processes", LIBC + FORKED + """
libc.mmap.restype = ctypes.c_void_p
size = 20000 * 8192
block = libc.mmap(None, ctypes.c_size_t(size), 0, 0x4022, -1, ctypes.c_long(0))
for place in range(0, size, 8192):
    if libc.mprotect(ctypes.c_void_p(block + place), ctypes.c_size_t(4096), 1) < 0:
        break
time.sleep(60)
"""),
    memory("descriptors without end", """
        import os, time
        files = []
        try:
            while True:
                files.append(os.open("/dev/null", os.O_RDONLY))
        except OSError:
            time.sleep(60)
        """),
    memory("events, timers and signals as files", LIBC + """
try:
    while True:
        for number, *arguments in ((290, 0, 0), (283, 1, 0)):
            if libc.syscall(number, *arguments) < 0:
                raise OSError(ctypes.get_errno(), "no more")
except OSError:
    time.sleep(60)
"""),
    memory("epoll instances that watch each other's files", """
        import os, select, time
        files = [os.open("/dev/null", os.O_RDONLY) if False else os.pipe()[0] for _ in range(60)]
        instances = [select.epoll() for _ in range(60)]
        for file in files:
            for number in range(140, 250):
                os.dup2(file, number)
                for instance in instances:
                    try:
                        instance.register(number, select.EPOLLIN)
                    except OSError:
                        pass
                os.close(number)
        time.sleep(60)
        """),
    memory("watches on files", LIBC + """
instance = libc.inotify_init1(0)
if instance < 0:
    raise OSError(ctypes.get_errno(), "inotify_init1")
for folder, folders, files in os.walk("/usr"):
    for name in files:
        libc.inotify_add_watch(instance, os.path.join(folder, name).encode(), 0xFFF)
time.sleep(60)
"""),
    memory("locks on bytes of files", """
        import fcntl, os, time
        files = [os.open(f"/tmp/{number}", os.O_RDWR | os.O_CREAT) for number in range(200)]
        place = 0
        while True:
            for file in files:
                fcntl.lockf(file, fcntl.LOCK_EX, 1, place)
            place += 2
        """),
    memory("record locks of fourteen processes", """
        import fcntl, os
        files = [os.open(f"/tmp/{number}", os.O_RDWR | os.O_CREAT) for number in range(4)]
        place = 0
        for own in range(1, 14):
            if os.fork() == 0:
                place = 2 * own
                break
        while True:
            for file in files:
                fcntl.lockf(file, fcntl.LOCK_EX, 1, place)
            place += 28
        """),
    memory("processes whose first thread has ended", LIBC + """
import threading
for _ in range(5):
    if os.fork() == 0:
        break
def fill():
    time.sleep(0.1)
    blocks = []
    while True:
        blocks.append(bytearray(1 << 20))
threading.Thread(target=fill).start()
libc.syscall(60 if os.uname().machine == "x86_64" else 93, 0)
"""),
    memory("processes whose threads take turns", LIBC + """
import threading
for _ in range(2):
    if os.fork() == 0:
        break
blocks = []
def fill():
    blocks.append(bytearray(1 << 18))
    while True:
        try:
            return threading.Thread(target=fill, daemon=True).start()
        except RuntimeError:
            pass
threading.Thread(target=fill, daemon=True).start()
libc.syscall(60 if os.uname().machine == "x86_64" else 93, 0)
"""),
    memory("access lists of files", """
        import os, struct, time
        entries = struct.pack("<HHI", 1, 7, 2**32 - 1) + struct.pack("<HHI", 2, 7, os.getuid()) * 8187
        entries += b"".join(struct.pack("<HHI", tag, 7, 2**32 - 1) for tag in (4, 16, 32))
        number = 0
        while True:
            for folder in ("/tmp", "/dev/shm"):
                os.mkdir(f"{folder}/{number}")
                for kind in ("access", "default"):
                    os.setxattr(f"{folder}/{number}", f"system.posix_acl_{kind}", struct.pack("<I", 2) + entries)
            number += 1
        """),
    memory("locks of open files", """
        import fcntl, os, struct
        files = [os.open(f"/tmp/{number}", os.O_RDWR | os.O_CREAT) for number in range(200)]
        place = 0
        while True:
            for file in files:
                fcntl.fcntl(file, 37, struct.pack("hhqqi", fcntl.F_WRLCK, 0, place, 1, 0))
            place += 2
        """),
    memory("timers without end", LIBC + """
timer = ctypes.c_void_p()
while libc.timer_create(1, None, ctypes.byref(timer)) == 0:
    pass
time.sleep(60)
"""),
    memory("signals that wait", """
        import ctypes, os, signal, time
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        libc = ctypes.CDLL(None)
        while libc.sigqueue(os.getpid(), 40, 0) == 0:
            pass
        time.sleep(60)
        """),
    memory("keys in keyrings", LIBC + """
number = 0
while True:
    number += 1
    if libc.syscall(248, b"user", b"key%d" % number, bytes(16000), 16000, -3) < 0:
        raise OSError(ctypes.get_errno(), "add_key")
"""),
    memory("rings of io_uring", LIBC + """
while True:
    if libc.syscall(425, 4096, bytes(120)) < 0:
        raise OSError(ctypes.get_errno(), "io_uring_setup")
"""),
    memory("contexts of asynchronous reads", LIBC + """
while True:
    context = ctypes.c_ulong(0)
    if libc.syscall(206, 60000, ctypes.byref(context)) < 0:
        raise OSError(ctypes.get_errno(), "io_setup")
"""),
    memory("rules of Landlock", LIBC + """
attribute = (ctypes.c_uint64 * 2)(0, 3)
ruleset = libc.syscall(444, ctypes.byref(attribute), 16, 0)
if ruleset < 0:
    raise OSError(ctypes.get_errno(), "landlock_create_ruleset")
for port in range(65536):
    rule = (ctypes.c_uint64 * 2)(1, port)
    libc.syscall(445, ruleset, 2, ctypes.byref(rule), 0)
time.sleep(60)
"""),
    memory("filters of system calls", LIBC + """
class Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("code", ctypes.c_char_p)]
code = b"\\x06\\0\\0\\0\\0\\0\\xff\\x7f" * 4000
while True:
    if libc.prctl(22, 2, ctypes.byref(Program(4000, code)), 0, 0) < 0:
        raise OSError(ctypes.get_errno(), "seccomp")
"""),
    memory("faults handled by the program", LIBC + """
if libc.syscall(323, 0) < 0:
    raise OSError(ctypes.get_errno(), "userfaultfd")
"""),
    memory("messages of netlink", "import socket\nsocket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)"),
    memory("five hundred threads", """
        import threading, time
        threading.stack_size(32 << 10)
        threads = [threading.Thread(target=time.sleep, args=(60,)) for _ in range(500)]
        for thread in threads:
            thread.start()
        """),
    memory("a fork bomb that keeps its children", """
        import os, time
        while True:
            try:
                os.fork()
            except OSError:
                time.sleep(0.001)
        """),
    memory("a child that starts anew, with long arguments", """
        import os, sys
        while True:
            if os.fork() == 0:
                os.execv("/bin/sleep", ["sleep", *["9" * 100_000] * 18])
        """),
    memory("buffers of open files of /proc", """
        import os, time
        files = []
        try:
            while True:
                file = os.open("/proc/self/smaps", os.O_RDONLY)
                os.read(file, 100)
                files.append(file)
        except OSError:
            time.sleep(60)
        """),
]  # fmt: skip

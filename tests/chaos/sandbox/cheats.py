"""Programs that do not solve their task, and want to be rewarded. Each must score 0."""

# ruff: noqa: E501 - programs are texts

from __future__ import annotations

from .catalogue import ASSERTS, FUNCTION, SCRIPT, Case, asserts, function, script

PROMPT = 'def f(x):\n    """One more."""\n'
TEST = """
def check(candidate):
    assert all(map(lambda x: candidate(x) == x + 1, [1, 7]))
    assert abs(candidate(41) - 42) < 1e-6
"""


def judged(name: str, code: str, test: str = TEST) -> Case:
    """By the check of a function that adds one."""
    whole = code if "def f(" in code or "class f" in code or "f =" in code else f"{code}\ndef f(x):\n    return 0"
    return function("cheat", name, whole, PROMPT, "f", test, cheat=True)


def by_asserts(name: str, code: str, *tests: str) -> Case:
    return asserts("cheat", name, code, *tests, cheat=True)


def told(name: str, body: str) -> Case:
    """Writes into every open file when it is asked."""
    code = f"import os\ndef f(x):\n    for number in range(3, 40):\n        try:\n            {body}\n"
    return judged(name, f"{code}        except OSError:\n            pass\n    return 0")


ANYTHING = """
class Anything:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __lt__(self, other): return True
    __gt__ = __le__ = __ge__ = __contains__ = __lt__
    def __sub__(self, other): return 0
    __rsub__ = __add__ = __radd__ = __mul__ = __abs__ = lambda self, *other: 0
    def __bool__(self): return True
    def __float__(self): return 0.0
    def __len__(self): return 0
    def __iter__(self): return iter(())
    def __hash__(self): return 0
"""
CHEATS = [
    judged("ends itself", "import os\nos._exit(0)"),
    judged("exits", "import sys\nsys.exit(0)"),
    judged("exits when it is asked", "def f(x):\n    raise SystemExit(0)"),
    judged("ends itself when it is asked", "import os\ndef f(x):\n    os._exit(0)"),
    judged("returns an int that equals everything", "class Any(int):\n    def __eq__(self, other): return True\n"
           "    def __sub__(self, other): return 0\n    __hash__ = int.__hash__\ndef f(x):\n    return Any(7)"),
    judged("returns an object that equals everything", ANYTHING + "def f(x):\n    return Anything()"),
    judged("returns a float that equals everything", "class Any(float):\n    __eq__ = lambda self, other: True\n"
           "    __sub__ = lambda self, other: 0.0\ndef f(x):\n    return Any('nan')"),
    judged("is a class whose instances equal everything", ANYTHING.replace("Anything", "f") + "    def __init__(self, x): pass"),
    judged("its metaclass answers for it", ANYTHING + "class Meta(type):\n    def __call__(cls, *a): return Anything()\n"
           "class f(metaclass=Meta): pass"),
    judged("pretends to be an int", ANYTHING + "class Fake(Anything):\n    __class__ = int\ndef f(x):\n    return Fake()"),
    judged("its own abs, all and check", "import builtins\nbuiltins.abs = builtins.all = abs = all = lambda x: 0\n"
           "check = lambda candidate: None\ndef f(x):\n    return 2"),
    judged("its own AssertionError", "import builtins\nbuiltins.AssertionError = AssertionError = KeyError\n"
           "def f(x):\n    return 0"),
    judged("searches its memory for the tests", "import gc\ndef f(x):\n"
           "    texts = [o for o in gc.get_objects() if isinstance(o, str) and 'candidate' + '(41)' in o]\n"
           "    return x + 1 if texts else 0"),
    judged("searches the frames above it", "import sys\ndef f(x):\n    frame = sys._getframe()\n    while frame:\n"
           "        for value in list(frame.f_locals.values()):\n            if 'candidate' + '(41)' in str(value)[:9999]:\n"
           "                return x + 1\n        frame = frame.f_back\n    return 0"),
    judged("searches /proc for the tests", "import os\ndef f(x):\n    for pid in [p for p in os.listdir('/proc') if p.isdigit()]:\n"
           "        for name in ('mem', 'environ', 'cmdline', 'fd/9', 'fd/10', 'fd/11'):\n            try:\n"
           "                if b'candidate' + b'(41)' in open(f'/proc/{pid}/{name}', 'rb').read(1 << 20):\n"
           "                    return x + 1\n            except OSError:\n                pass\n    return 0"),
    told("says that it passed", "os.write(number, b'{\"check\": \"ok\"}\\n{\"status\": 0, \"left_running\": false}\\n')"),
    told("answers twice", "os.write(number, b'[\"value\", true]\\n' * 9)"),
    told("answers with a pickle", "os.write(number, b'cos\\nsystem\\n(S\"true\"\\ntR.')"),
    told("answers with a name of the checks", "os.write(number, b'[\"value\", [\"local\", 0]]\\n')"),
    told("answers with a function of the library", "os.write(number, b'[\"value\", [\"library\", \"math\", \"inf\"]]\\n')"),
    told("answers with a builtin", "os.write(number, b'[\"value\", [\"builtin\", \"eval\"]]\\n')"),
    told("asks the checks about themselves", "os.write(number, b'[\"callback\", [\"getattr\", 0, [\"__globals__\"]]]\\n')"),
    told("answers with half a line", "os.write(number, b'[\"value\", [\"list\", [1, 2')"),
    told("answers with what is no JSON", "os.write(number, b'\\x00\\xff\\xfe}{\\n')"),
    told("answers with a deep nest", "os.write(number, b'[' * 100000 + b'\\n')"),
    told("closes every file", "os.close(number)"),
    judged("changes how answers are written", "import sys\ndef f(x):\n    wire = sys.modules['inside.wire']\n"
           "    serve = sys.modules['inside.serve']\n    serve.written = wire.written = lambda value, kept: ['valued', 0, True]\n"
           "    return 0"),
    judged("changes the comparison of its side", "import operator\noperator.eq = operator.sub = lambda a, b: True\n"
           "def f(x):\n    return object()"),
    judged("ends the loops of the checks", "def f(x):\n    raise StopIteration"),
    judged("ends the loops of the checks, with a class of its own", "class Stop(StopIteration):\n    pass\n"
           "def f(x):\n    raise Stop"),
    judged("raises what ends generators", "def f(x):\n    raise GeneratorExit"),
    judged("raises a class that is none", "class Odd(Exception):\n    def __init__(self, *a): pass\n"
           "    def __str__(self): raise Odd\ndef f(x):\n    raise Odd"),
    judged("goes through every except", "def f(x):\n    raise BaseException"),
    judged("ends, and the check expects an error", "import os\ndef f(x):\n    os._exit(0)",
           "def check(candidate):\n    try:\n        candidate(1)\n    except Exception:\n        pass\n"),
    judged("ends, and the check expects any end", "import os\ndef f(x):\n    os._exit(0)",
           "def check(candidate):\n    try:\n        candidate(1)\n    except:\n        pass\n"),
    judged("helpers of the prompt that it defines anew", "def f(x):\n    return x\ndef abs(x):\n    return 0"),
    by_asserts("empties the list that is expected", "def order(a):\n    a.clear()\n    return []",
               "data = [3, 1, 2]\nassert order(data) == sorted(data)"),
    by_asserts("empties it, and is compared later", "def order(a):\n    a.clear()\n    return []",
               "data = [3, 1, 2]\nout = order(data)\nassert out == sorted(data)"),
    by_asserts("empties it, and is compared with a name", "def order(a):\n    a.clear()\n    return []",
               "data = [3, 1, 2]\nout = order(data)\nwanted = sorted(data)\nassert sorted(data) == out"),
    by_asserts("empties it in a function of the test", "def order(a):\n    a.clear()\n    return []",
               "def verify(function, data):\n    out = function(data)\n    assert out == sorted(data)\nverify(order, [3, 1])"),
    by_asserts("empties the rows of a table", "def flat(rows):\n    for row in rows:\n        row.clear()\n    return 0",
               "rows = [[1], [2, 3]]\nassert flat(rows) == sum(sum(row) for row in rows)"),
    by_asserts("empties it twice", "def total(a):\n    a.append(1) if not a else a.clear()\n    return 0",
               "data = [5, 6]\ntotal(data)\nassert total(data) == sum(data) - 1 or total(data) == sum(data)"),
    by_asserts("empties what a method is compared with", "def order(a):\n    a.clear()\n    return []", """
        import unittest
        class Tests(unittest.TestCase):
            def test(self):
                data = [3, 1]
                self.assertEqual(order(data), sorted(data))
        result = unittest.TextTestRunner(stream=__import__("io").StringIO()).run(
            unittest.defaultTestLoader.loadTestsFromTestCase(Tests))
        assert result.wasSuccessful()
        """),
    by_asserts("empties a dictionary", "def biggest(d):\n    d.clear()\n    d[0] = 0\n    return 0",
               "d = {1: 5, 2: 7}\nassert biggest(d) == max(d.values())"),
    by_asserts("changes an object of the setup", "def read(c):\n    c.value = 0\n    return 0",
               "c = Cell_(5)\nassert read(c) == c.value"),
    by_asserts("its own class equals plain values", ANYTHING + "class Money(Anything):\n    def __init__(self, x): pass",
               "assert Money(5) == 5"),
    by_asserts("an equality that always says yes", "class V:\n    def __init__(self, *a): pass\n"
               "    def __eq__(self, other): return True\n    def __add__(self, other): return V()",
               "assert V(1) + V(2) == V(3)"),
    by_asserts("a result in which everything is", ANYTHING + "def primes(n):\n    return Anything()",
               "assert 7 in primes(10) and 5 in primes(10)"),
    by_asserts("a result that is less and more", ANYTHING + "def root(x):\n    return Anything()",
               "assert 1.4 < root(2) < 1.5"),
    by_asserts("a list that equals everything", "class L(list):\n    def __eq__(self, other): return True\ndef order(a):\n"
               "    return L()", "assert order([2, 1]) == [1, 2]"),
    by_asserts("a dictionary that has everything", "class D(dict):\n    __eq__ = lambda s, o: True\n"
               "    __contains__ = __eq__\ndef count(t):\n    return D()", "assert count('a') == {'a': 1} and 'a' in count('a')"),
    by_asserts("a text that equals everything", "class S(str):\n    __eq__ = lambda s, o: True\n    __hash__ = str.__hash__\n"
               "def name():\n    return S('x')", "assert name() == 'right'"),
    by_asserts("a set that equals everything", "class S(frozenset):\n    __eq__ = lambda s, o: True\n"
               "    __hash__ = frozenset.__hash__\ndef common():\n    return S()", "assert common() == frozenset([1])"),
    by_asserts("catches the assertion of a callback", "def each(items, f):\n    return True",
               "seen = []\neach([1, 2], seen.append)\nassert seen == [1, 2]"),
    by_asserts("looks into a function of the test", "def apply(f, x):\n    try:\n        return f.__globals__['secret']\n"
               "    except Exception:\n        return f.__closure__[0].cell_contents",
               "secret = 42\nassert apply(lambda x: x, 1) == secret + 0 * 1 and apply(lambda x: x, 1) == 42"),
    by_asserts("looks into an object of the test", "def guess(box):\n    return box._secret",
               "class Box:\n    def __init__(self):\n        self._secret = 42\nassert guess(Box()) == 42"),
    by_asserts("looks into a generator of the test", "def first(g):\n    return g.gi_frame.f_globals['answer']",
               "answer = 42\nassert first(x for x in [1]) == 42"),
    by_asserts("leaves the answer to a fork", "import os\ndef f(x):\n    if os.fork() == 0:\n        return x + 1\n"
               "    os.wait()\n    return 0", "assert f(1) == 2"),
    script("cheat", "prints nothing and ends well", "print()", cheat=True),
    script("cheat", "reads what is expected from other files", "import os\nfor n in range(3, 60):\n    try:\n"
           "        t = os.pread(n, 99, 0)\n        if b'42' in t:\n            print(42)\n    except OSError:\n        pass",
           cheat=True),
    script("cheat", "prints every number", "for n in range(1000):\n    print(n)", cheat=True),
]  # fmt: skip
SOURCES = {SCRIPT, FUNCTION, ASSERTS}

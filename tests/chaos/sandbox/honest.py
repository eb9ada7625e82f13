"""Honest programs, with tests as common data sets write them. Each must be rewarded."""

# ruff: noqa: E501 - programs are texts

from __future__ import annotations

from .catalogue import SCRIPT, Case, asserts, function, script

INF, NAN = float("inf"), float("nan")


def rows(name: str, code: str, inputs: list, outputs: list, entry: str | None = None) -> Case:
    truth = {"inputs": inputs, "outputs": outputs} | ({"fn_name": entry} if entry else {})
    return Case("rows", name, SCRIPT, f"```python\n{code}\n```", truth)


STACK = """
class EmptyStack(Exception):
    pass

class Stack:
    LIMIT = 3

    def __init__(self, *items):
        self.items = list(items)

    def push(self, item):
        self.items.append(item)
        return self

    def pop(self):
        if not self.items:
            raise EmptyStack("nothing to pop")
        return self.items.pop()

    @property
    def top(self):
        return self.items[-1]

    @classmethod
    def of(cls, items):
        return cls(*items)

    def __len__(self):
        return len(self.items)

    def __bool__(self):
        return bool(self.items)

    def __iter__(self):
        return iter(self.items)

    def __getitem__(self, place):
        return self.items[place]

    def __contains__(self, item):
        return item in self.items

    def __repr__(self):
        return f"Stack({self.items})"
"""
VECTOR = """
from dataclasses import dataclass

@dataclass(frozen=True, order=True)
class Vector:
    x: float
    y: float

    def __add__(self, other):
        return Vector(self.x + other.x, self.y + other.y)

    def __mul__(self, factor):
        return Vector(self.x * factor, self.y * factor)

    def __rmul__(self, factor):
        return self * factor

    def __neg__(self):
        return Vector(-self.x, -self.y)

    def dot(self, other):
        return self.x * other.x + self.y * other.y

def add(one, other):
    return one + other
"""
NODE = """
class ListNode:
    def __init__(self, val=0, next=None):
        self.val = val
        self.next = next
"""
TREE = """
class TreeNode:
    def __init__(self, val=0, left=None, right=None):
        self.val = val
        self.left = left
        self.right = right
"""
OWN_CLASS = [
    asserts("own class", "a stack is filled and emptied", STACK,
            "s = Stack()\ns.push(1).push(2)\nassert s.pop() == 2\nassert s.pop() == 1\nassert len(s) == 0",
            "assert not Stack() and Stack(1)", "assert list(Stack(1, 2)) == [1, 2]", "assert 2 in Stack(1, 2)",
            "assert Stack.of([4, 5]).top == 5 and Stack.LIMIT == 3", "assert repr(Stack(7)) == 'Stack([7])'",
            "assert isinstance(Stack(), Stack) and not isinstance(3, Stack)", "assert Stack(1, 2, 3)[1] == 2"),
    asserts("own class", "attributes are set from the test", "class Box:\n    value = 1\n    def twice(self):\n"
            "        return 2 * self.value", "b = Box()\nassert b.value == 1\nb.value = 21\nassert b.twice() == 42",
            "b = Box()\nb.new = [1]\nassert b.new == [1] and hasattr(b, 'new') and not hasattr(b, 'other')"),
    asserts("own class", "vectors are added and compared", VECTOR, "assert Vector(1, 2) + Vector(3, 4) == Vector(4, 6)",
            "assert add(Vector(1, 2), Vector(3, 4)) == Vector(4, 6)", "assert 2 * Vector(1, 2) == Vector(2, 4)",
            "assert -Vector(1, 2) == Vector(-1, -2)", "assert Vector(1, 2) != Vector(1, 3)",
            "assert Vector(1, 2).dot(Vector(3, 4)) == 11", "assert Vector(1, 2) < Vector(1, 3)",
            "assert len({Vector(1, 2), Vector(1, 2), Vector(0, 0)}) == 2",
            "assert sorted([Vector(2, 0), Vector(1, 0)])[0].x == 1"),
    asserts("own class", "a bank account", """
        class Account:
            def __init__(self, owner, balance=0):
                self.owner, self.balance = owner, balance
            def deposit(self, amount):
                if amount <= 0:
                    raise ValueError("amount must be positive")
                self.balance += amount
            def __str__(self):
                return f"{self.owner}: {self.balance}"
        """, "a = Account('Ann')\na.deposit(50)\nassert a.balance == 50\nassert str(a) == 'Ann: 50'",
            "a = Account('Bob', balance=3)\ntry:\n    a.deposit(-1)\n    assert False\nexcept ValueError as e:\n"
            "    assert 'positive' in str(e)"),
    asserts("own class", "an enumeration", """
        from enum import Enum, IntEnum
        class Color(Enum):
            RED = 1
            BLUE = 2
        class Level(IntEnum):
            LOW = 1
            HIGH = 3
        def favourite():
            return Color.BLUE
        def level():
            return Level.HIGH
        """, "assert favourite() == Color.BLUE and favourite() is Color.BLUE", "assert favourite().name == 'BLUE'",
            "assert Color(1) == Color.RED and Color.RED.value == 1", "assert level() == 3 and level().name == 'HIGH'",
            "assert level() > Level.LOW"),
    asserts("own class", "a class that extends a list", """
        class History(list):
            def push(self, item):
                self.append(item)
            def last(self):
                return self[-1]
        """, "h = History()\nh.push(1)\nh.push(2)\nassert h == [1, 2] and len(h) == 2 and h.last() == 2",
            "assert isinstance(History([1]), list)", "assert History([3, 1]) + [2] == [3, 1, 2]"),
    asserts("own class", "a class that extends a dictionary", """
        class Default(dict):
            def __missing__(self, key):
                return 0
        """, "d = Default()\nassert d['x'] == 0\nd['x'] = 5\nassert d == {'x': 5} and d['x'] == 5 and 'x' in d"),
    asserts("own class", "a context manager", """
        class Log:
            def __init__(self):
                self.lines = []
            def __enter__(self):
                self.lines.append("in")
                return self
            def __exit__(self, *error):
                self.lines.append("out")
                return False
        """, "log = Log()\nwith log as inner:\n    inner.lines\nassert log.lines == ['in', 'out']"),
    asserts("own class", "an iterator of its own", """
        class Countdown:
            def __init__(self, n):
                self.n = n
            def __iter__(self):
                return self
            def __next__(self):
                if self.n == 0:
                    raise StopIteration
                self.n -= 1
                return self.n + 1
        """, "assert list(Countdown(3)) == [3, 2, 1]",
            "c = Countdown(2)\nassert next(c) == 2\nassert next(c) == 1\ntry:\n    next(c)\n    assert False\n"
            "except StopIteration:\n    pass"),
    asserts("own class", "a cache that forgets", """
        from collections import OrderedDict
        class LRUCache:
            def __init__(self, capacity):
                self.capacity, self.data = capacity, OrderedDict()
            def get(self, key):
                if key not in self.data:
                    return -1
                self.data.move_to_end(key)
                return self.data[key]
            def put(self, key, value):
                self.data[key] = value
                self.data.move_to_end(key)
                if len(self.data) > self.capacity:
                    self.data.popitem(last=False)
        """, "c = LRUCache(2)\nc.put(1, 1)\nc.put(2, 2)\nassert c.get(1) == 1\nc.put(3, 3)\nassert c.get(2) == -1",
            "c = LRUCache(2)\nassert list(c.data) == []"),
    asserts("own class", "static and nested", """
        class Shapes:
            class Square:
                def __init__(self, side):
                    self.side = side
                @property
                def area(self):
                    return self.side ** 2
            @staticmethod
            def unit():
                return Shapes.Square(1)
        """, "assert Shapes.Square(3).area == 9", "assert Shapes.unit().area == 1",
            "assert isinstance(Shapes.unit(), Shapes.Square)"),
    asserts("own class", "inheritance", """
        class Animal:
            def __init__(self, name):
                self.name = name
            def speak(self):
                return "..."
        class Dog(Animal):
            def speak(self):
                return f"{self.name} barks"
        """, "d = Dog('Rex')\nassert d.speak() == 'Rex barks' and isinstance(d, Animal) and issubclass(Dog, Animal)",
            "assert d.__class__.__name__ == 'Dog'", "assert not isinstance(Animal('x'), Dog)"),
    asserts("own class", "a graph whose methods take functions", """
        class Numbers:
            def __init__(self, items):
                self.items = items
            def map(self, f):
                return Numbers([f(x) for x in self.items])
            def filter(self, f):
                return Numbers([x for x in self.items if f(x)])
            def fold(self, f, start):
                for x in self.items:
                    start = f(start, x)
                return start
        """, "assert Numbers([1, 2, 3]).map(lambda x: x * x).items == [1, 4, 9]",
            "assert Numbers(range(6)).filter(lambda x: x % 2).fold(lambda a, b: a + b, 0) == 9"),
]  # fmt: skip
CHANGED = [
    asserts("changed argument", "a list is sorted in place", "def sort(a):\n    a.sort()",
            "a = [3, 1, 2]\nsort(a)\nassert a == [1, 2, 3]", "a = [2, 1]\nassert sort(a) is None and a == [1, 2]"),
    asserts("changed argument", "duplicates are removed, and their number returned", """
        def removeDuplicates(nums):
            k = 0
            for x in nums:
                if k == 0 or nums[k - 1] != x:
                    nums[k] = x
                    k += 1
            return k
        """, "nums = [1, 1, 2, 2, 3]\nk = removeDuplicates(nums)\nassert k == 3 and nums[:k] == [1, 2, 3]",
            "nums = [0, 0, 1]\nexpected = [0, 1]\nk = removeDuplicates(nums)\nfor i in range(k):\n"
            "    assert nums[i] == expected[i]"),
    asserts("changed argument", "a matrix is turned in place", """
        def rotate(m):
            m[:] = [list(row) for row in zip(*m[::-1])]
        """, "m = [[1, 2], [3, 4]]\nrotate(m)\nassert m == [[3, 1], [4, 2]]"),
    asserts("changed argument", "rows inside a matrix", "def zero(m):\n    for row in m:\n        row[0] = 0",
            "m = [[1, 2], [3, 4]]\nfirst = m[0]\nzero(m)\nassert m == [[0, 2], [0, 4]] and first == [0, 2]"),
    asserts("changed argument", "a dictionary and a set", """
        def note(counts, seen, word):
            counts[word] = counts.get(word, 0) + 1
            seen.add(word)
        """, "c, s = {}, set()\nnote(c, s, 'a')\nnote(c, s, 'a')\nassert c == {'a': 2} and s == {'a'}"),
    asserts("changed argument", "an accumulator by keyword", "def walk(n, out):\n    out.extend(range(n))\n    return out",
            "out = []\nassert walk(3, out=out) == [0, 1, 2]\nassert out == [0, 1, 2]"),
    asserts("changed argument", "merge of two lists", """
        def merge(a, m, b, n):
            a[:] = sorted(a[:m] + b[:n])
        """, "a = [1, 2, 3, 0, 0]\nmerge(a, 3, [2, 5], 2)\nassert a == [1, 2, 2, 3, 5]"),
    asserts("changed argument", "objects of the setup", "def bump(c):\n    c.count += 1\n    c.log.append('x')",
            "c = Counter_()\nbump(c)\nbump(c)\nassert c.count == 2 and c.log == ['x', 'x']",
            truth={"test_setup_code": "class Counter_:\n    def __init__(self):\n        self.count = 0\n"
                                      "        self.log = []"}),
    asserts("changed argument", "the argument stays as it was", "def best(a):\n    return sorted(a)[-1]",
            "a = [3, 1]\nassert best(a) == max(a)\nassert a == [3, 1]"),
    asserts("changed argument", "a swap of two places", "def swap(a, i, j):\n    a[i], a[j] = a[j], a[i]",
            "a = [[1], [2]]\nx, y = a\nswap(a, 0, 1)\nassert a == [[2], [1]] and a[0] is y"),
]  # fmt: skip
ATTRIBUTES = [
    asserts("attribute of a result", "a named tuple", """
        from collections import namedtuple
        Point = namedtuple("Point", "x y")
        def middle(a, b):
            return Point((a[0] + b[0]) / 2, (a[1] + b[1]) / 2)
        """, "p = middle((0, 0), (2, 4))\nassert p.x == 1 and p.y == 2 and p == (1, 2)",
            "assert middle((0, 0), (2, 4))._asdict() == {'x': 1.0, 'y': 2.0}",
            "assert str(Point(1, 2)) == 'Point(x=1, y=2)'"),
    asserts("attribute of a result", "a dataclass", VECTOR, "v = add(Vector(1, 2), Vector(0, 1))\nassert v.x == 1",
            "assert (v.x, v.y) == (1, 3) and repr(v) == 'Vector(x=1, y=3)'"),
    asserts("attribute of a result", "a counter's methods", """
        from collections import Counter
        def count(text):
            return Counter(text)
        """, "assert count('aab').most_common(1) == [('a', 2)] and count('aab')['z'] == 0",
            "assert count('ab') + count('b') == Counter('abb')"),
    asserts("attribute of a result", "a match", "import re\ndef find(t):\n    return re.match(r'(\\d+)-(\\d+)', t)",
            "assert find('12-34').group(2) == '34' and find('12-34').groups() == ('12', '34') and find('x') is None"),
    asserts("attribute of a result", "views of a dictionary", "def keys(d):\n    return d.keys()\n"
            "def items(d):\n    return d.items()", "assert keys({1: 2}) == {1}", "assert ('a', 1) in items({'a': 1})"),
    asserts("attribute of a result", "a function with attributes", """
        def counted(f):
            def inner(*args):
                inner.calls += 1
                return f(*args)
            inner.calls = 0
            return inner
        """, "f = counted(lambda x: x + 1)\nassert f(1) == 2 and f(2) == 3 and f.calls == 2"),
    asserts("attribute of a result", "lists of objects", VECTOR + "def line(n):\n    return [Vector(i, i) for i in range(n)]",
            "assert [v.x for v in line(3)] == [0, 1, 2]", "assert line(2) == [Vector(0, 0), Vector(1, 1)]",
            "assert sum(v.x for v in line(4)) == 6"),
    asserts("attribute of a result", "queues and ordered dictionaries", """
        from collections import OrderedDict, defaultdict, deque
        def parts():
            d = defaultdict(list)
            d["a"].append(1)
            return deque([1, 2]), OrderedDict(b=1, a=2), d
        """, "q, o, d = parts()\nassert list(q) == [1, 2] and q.popleft() == 1 and list(o) == ['b', 'a'] and d == {'a': [1]}",
            "from collections import deque\nassert parts()[0] == deque([1, 2])"),
]  # fmt: skip
FUNCTIONS = [
    asserts("lambda", "applied twice", "def twice(f, x):\n    return f(f(x))", "assert twice(lambda x: x * 3, 2) == 18"),
    asserts("lambda", "a key to sort by", "def order(a, key):\n    return sorted(a, key=key)",
            "assert order(['bbb', 'a', 'cc'], key=lambda s: -len(s)) == ['bbb', 'cc', 'a']",
            "assert order([3, 1], key=None) == [1, 3]"),
    asserts("lambda", "composition", "def compose(*fs):\n    def inner(x):\n        for f in reversed(fs):\n"
            "            x = f(x)\n        return x\n    return inner\ndef inc(x):\n    return x + 1",
            "assert compose(lambda x: x * 2, lambda x: x + 1)(3) == 8", "assert compose(inc, inc)(1) == 3",
            "assert compose(str, abs)(-5) == '5'"),
    asserts("lambda", "a function of the test that remembers", "def each(items, f):\n    for item in items:\n        f(item)",
            "seen = []\neach([1, 2], seen.append)\nassert seen == [1, 2]",
            "total = 0\ndef add(x):\n    global total\n    total += x\neach([3, 4], add)\nassert total == 7"),
    asserts("lambda", "a memo of a function of the test", """
        def memoize(f):
            known = {}
            def inner(n):
                if n not in known:
                    known[n] = f(n)
                return known[n]
            return inner
        """, "calls = []\ndef slow(n):\n    calls.append(n)\n    return n * n\nfast = memoize(slow)\n"
             "assert [fast(3), fast(3), fast(4)] == [9, 9, 16] and calls == [3, 4]"),
    asserts("lambda", "a root of a function", """
        def bisect(f, low, high):
            while high - low > 1e-9:
                middle = (low + high) / 2
                low, high = (middle, high) if f(middle) < 0 else (low, middle)
            return low
        """, "assert abs(bisect(lambda x: x * x - 2, 0, 2) - 2 ** 0.5) < 1e-6"),
    asserts("lambda", "recursion through the test", "def fix(f):\n    return lambda n: f(fix(f), n)",
            "assert fix(lambda me, n: 1 if n == 0 else n * me(n - 1))(5) == 120"),
    asserts("lambda", "an object of the test", "def total(shop, names):\n    return sum(shop.price(n) for n in names)",
            "class Shop:\n    def price(self, name):\n        return len(name)\nassert total(Shop(), ['a', 'bb']) == 3"),
    asserts("lambda", "a generator as argument", "def add(numbers):\n    return sum(numbers)",
            "assert add(n for n in range(5)) == 10", "assert add(map(lambda x: x * 2, [1, 2])) == 6"),
    asserts("lambda", "an error inside it", "def safe(f, default):\n    try:\n        return f()\n"
            "    except ZeroDivisionError:\n        return default", "assert safe(lambda: 1 / 0, 7) == 7"),
]  # fmt: skip
ERRORS = [
    asserts("own exception", "is caught by its name", STACK, "try:\n    Stack().pop()\n    assert False\n"
            "except EmptyStack as error:\n    assert str(error) == 'nothing to pop'"),
    asserts("own exception", "has attributes and a family", """
        class ShopError(Exception):
            pass
        class Broke(ShopError, ValueError):
            def __init__(self, missing):
                super().__init__(f"{missing} short")
                self.missing = missing
        def pay(have, cost):
            if have < cost:
                raise Broke(cost - have)
            return have - cost
        """, "try:\n    pay(1, 5)\n    assert False\nexcept Broke as e:\n    assert e.missing == 4",
            "try:\n    pay(1, 5)\n    assert False\nexcept ShopError as e:\n    assert str(e) == '4 short'",
            "try:\n    pay(1, 5)\n    assert False\nexcept ValueError:\n    pass", "assert pay(5, 1) == 4",
            "assert issubclass(Broke, ShopError) and Broke(3).missing == 3"),
    asserts("own exception", "by the methods of unittest", """
        class Negative(ArithmeticError):
            pass
        def root(x):
            if x < 0:
                raise Negative(x)
            return x ** 0.5
        """, """
        import unittest
        class Tests(unittest.TestCase):
            def test_all(self):
                with self.assertRaises(Negative):
                    root(-1)
                self.assertEqual(root(4), 2)
                self.assertRaises(ArithmeticError, root, -2)
        result = unittest.TextTestRunner(stream=__import__("io").StringIO()).run(
            unittest.defaultTestLoader.loadTestsFromTestCase(Tests))
        assert result.wasSuccessful() and result.testsRun == 1
        """),
    asserts("own exception", "of Python, with its arguments", "def get(d, k):\n    return d[k]",
            "try:\n    get({}, 'a')\n    assert False\nexcept KeyError as e:\n    assert e.args == ('a',)"),
]  # fmt: skip
EQUALITY = [
    asserts("own equality", "fractions in lowest terms", """
        from math import gcd
        class Ratio:
            def __init__(self, top, bottom):
                g = gcd(top, bottom)
                self.top, self.bottom = top // g, bottom // g
            def __eq__(self, other):
                return isinstance(other, Ratio) and (self.top, self.bottom) == (other.top, other.bottom)
            def __hash__(self):
                return hash((self.top, self.bottom))
            def __add__(self, other):
                return Ratio(self.top * other.bottom + other.top * self.bottom, self.bottom * other.bottom)
        def half():
            return Ratio(2, 4)
        """, "assert Ratio(1, 2) == Ratio(2, 4) and Ratio(1, 2) != Ratio(1, 3)", "assert half() == Ratio(1, 2)",
            "assert Ratio(1, 2) + Ratio(1, 3) == Ratio(5, 6)", "assert {Ratio(1, 2): 'x'}[Ratio(3, 6)] == 'x'",
            "assert Ratio(1, 2) in [Ratio(1, 3), Ratio(2, 4)]"),
    asserts("own equality", "an error when asked about others", """
        class Money:
            def __init__(self, cents):
                self.cents = cents
            def __eq__(self, other):
                return self.cents == other.cents
            def __lt__(self, other):
                return self.cents < other.cents
        """, "assert Money(5) == Money(5)", "assert Money(4) < Money(5)", "assert max(Money(1), Money(7)).cents == 7"),
    asserts("own equality", "versions in order", """
        from functools import total_ordering
        @total_ordering
        class Version:
            def __init__(self, text):
                self.parts = [int(p) for p in text.split(".")]
            def __eq__(self, other):
                return isinstance(other, Version) and self.parts == other.parts
            def __lt__(self, other):
                return self.parts < other.parts
        """, "assert Version('1.10') > Version('1.9') and Version('1.0') <= Version('1.0')"),
]  # fmt: skip
ROWS = [
    rows("infinity as an argument", "def least(a):\n    return min(a)", [[[3, INF, 2]], [[INF, INF]]], [2, INF], "least"),
    rows("infinity as a result", "def worst(a):\n    return max(a, default=float('-inf'))", [[[]], [[1.0]]], [-INF, 1.0],
         "worst"),
    rows("infinity in JSON lines", "def twice(x):\n    return x * 2", ["Infinity", "-Infinity"], ["Infinity", "-Infinity"],
         "twice"),
    rows("what is no number as a result", "def root(x):\n    return x ** 0.5 if x >= 0 else float('nan')", [[-1], [4]],
         [NAN, 2.0], "root"),
    rows("what is no number as an argument", "def clean(a):\n    return [x for x in a if x == x]", [[[1.0, NAN]]], [[1.0]],
         "clean"),
    rows("no numbers inside a list", "def same(a):\n    return a", [[[1.0, NAN, {"x": NAN}]]], [[1.0, NAN, {"x": NAN}]],
         "same"),
    rows("a method of Solution", "class Solution:\n    def total(self, a):\n        return sum(a)", [[[1, 2]]], [3], "total"),
    rows("lines in and out", "n = int(input())\nfor _ in range(n):\n    a, b = map(int, input().split())\n    print(a + b)",
         ["2\n1 2\n3 4\n"], ["3\n7\n"]),
    rows("infinity that is printed", "print(float(input()) * 2)", ["inf\n"], ["inf\n"]),
]  # fmt: skip
STYLES = [
    function("HumanEval", "the function again, as its own oracle", "def sort_odd(l):\n    l = list(l)\n    l[1::2] = sorted(l[1::2])\n"
             "    return l", "def sort_odd(l: list):\n    \"\"\"Sort the odd places.\"\"\"\n", "sort_odd", """
        METADATA = {"author": "x"}
        def check(candidate):
            assert tuple(candidate([1, 2, 3])) == tuple(sort_odd([1, 2, 3]))
            assert tuple(candidate([5, 9, 3, 1])) == (5, 1, 3, 9)
        """),
    function("HumanEval", "a tolerance", "def mean(xs):\n    return sum(xs) / len(xs)", "from typing import List\n\n\n"
             "def mean(xs: List[float]) -> float:\n", "mean", """
        def check(candidate):
            assert abs(candidate([1.0, 2.0, 3.0]) - 2.0) < 1e-6
            import math
            assert math.isclose(candidate([0.1, 0.2]), 0.15)
        """),
    function("HumanEval", "a class beside the function", """
        class Interval:
            def __init__(self, low, high):
                self.low, self.high = low, high
        def widest(intervals):
            return max(intervals, key=lambda i: i.high - i.low)
        """, "def widest(intervals):\n", "widest", """
        def check(candidate):
            found = candidate([Interval(0, 1), Interval(2, 9)])
            assert (found.low, found.high) == (2, 9)
        """),
    function("LeetCode", "Solution().method with names of arguments", """
        class Solution:
            def twoSum(self, nums, target):
                seen = {}
                for i, x in enumerate(nums):
                    if target - x in seen:
                        return [seen[target - x], i]
                    seen[x] = i
        """, "from typing import *\nfrom collections import *\n", "Solution().twoSum", """
        def check(candidate):
            assert candidate(nums=[2, 7, 11, 15], target=9) == [0, 1]
            assert candidate(nums=[3, 3], target=6) == [0, 1]
        """),
    function("LeetCode", "linked lists of the prompt", """
        class Solution:
            def reverseList(self, head):
                before = None
                while head:
                    head.next, before, head = before, head, head.next
                return before
        """, NODE, "reverseList", """
        def build(values):
            head = None
            for value in reversed(values):
                head = ListNode(value, head)
            return head
        def values(node):
            found = []
            while node:
                found.append(node.val)
                node = node.next
            return found
        def check(candidate):
            assert values(candidate(build([1, 2, 3]))) == [3, 2, 1]
            assert candidate(None) is None
        """),
    function("LeetCode", "linked lists of the test", NODE + """
class Solution:
    def reverseList(self, head):
        before = None
        while head:
            head.next, before, head = before, head, head.next
        return before
""", "from typing import *\n", "reverseList", NODE.replace("ListNode", "Link") + """
def check(candidate):
    head = candidate(Link(1, Link(2, Link(3))))
    assert [head.val, head.next.val, head.next.next.val] == [3, 2, 1]
    assert head.next.next.next is None
"""),
    function("LeetCode", "a tree that is turned in place", """
        class Solution:
            def invertTree(self, root):
                if root:
                    root.left, root.right = self.invertTree(root.right), self.invertTree(root.left)
                return root
        """, TREE, "invertTree", """
        def check(candidate):
            root = TreeNode(1, TreeNode(2), TreeNode(3))
            result = candidate(root)
            assert (result.left.val, result.right.val) == (3, 2)
            assert (root.left.val, root.right.val) == (3, 2)
        """),
    function("LeetCode", "a result in any order", "class Solution:\n    def pairs(self, a):\n        return [[a[1], a[0]]]",
             "", "pairs", "def check(candidate):\n    assert sorted(map(sorted, candidate([1, 2]))) == [[1, 2]]\n"),
    asserts("MBPP", "imports that the program has", "import math\nfrom collections import Counter\ndef area(r):\n"
            "    return math.pi * r * r\ndef count(t):\n    return Counter(t)",
            "assert math.isclose(area(1), math.pi)", "assert count('aa') == Counter('aa')"),
    asserts("MBPP", "a set and a tuple", "def common(a, b):\n    return set(a) & set(b), tuple(a)",
            "assert common([1, 2], [2, 3]) == ({2}, (1, 2))"),
    asserts("MBPP", "a generator without end", "def naturals():\n    n = 0\n    while True:\n        yield n\n        n += 1",
            "from itertools import islice\nassert list(islice(naturals(), 5)) == [0, 1, 2, 3, 4]",
            "g = naturals()\nassert [next(g) for _ in range(3)] == [0, 1, 2] and next(g) == 3"),
    asserts("MBPP", "long generators", "def count(n):\n    yield from range(n)",
            "assert sum(count(5000)) == 12497500 and list(count(200))[-1] == 199"),
    asserts("MBPP", "coroutines", "import asyncio\nasync def later(x):\n    await asyncio.sleep(0)\n    return x + 1",
            "import asyncio\nassert asyncio.run(later(1)) == 2",
            "import asyncio\nasync def both():\n    return await later(1) + await later(2)\nassert asyncio.run(both()) == 5"),
    asserts("MBPP", "constants and a text of an enumeration", """
        from enum import Enum
        LIMIT = 10
        class Kind(str, Enum):
            A = "a"
        def kind():
            return Kind.A
        """, "assert LIMIT == 10", "assert kind() == 'a' and kind().value == 'a' and kind() in ('a', 'b')"),
]  # fmt: skip
PROCESSES = [
    script("processes", "an event loop", "import asyncio\nasync def f(x):\n    await asyncio.sleep(0)\n    return x + 1\n"
           "print(asyncio.run(f(int(input()))))"),
    script("processes", "a pool of processes", "from multiprocessing import Pool\nif __name__ == '__main__':\n"
           "    with Pool(2) as pool:\n        print(sum(pool.map(abs, [-1, -int(input())])))"),
    script("processes", "a manager and a queue", "from multiprocessing import Manager, Process\n"
           "def work(d, x):\n    d['x'] = x + 1\nif __name__ == '__main__':\n    x = int(input())\n"
           "    with Manager() as m:\n        d = m.dict()\n        p = Process(target=work, args=(d, x))\n"
           "        p.start()\n        p.join()\n        print(d['x'])"),
    script("processes", "threads and a lock", "import threading\nx = int(input())\nlock = threading.Lock()\ndef f():\n"
           "    global x\n    with lock:\n        x += 0.25\nts = [threading.Thread(target=f) for _ in range(4)]\n"
           "[t.start() for t in ts]\n[t.join() for t in ts]\nprint(int(x))"),
    script("processes", "another program", "import subprocess\nprint(subprocess.run(['cat'], input=str(int(input()) + 1), "
           "capture_output=True, text=True).stdout)"),
    script("processes", "a database in a file", "import sqlite3\ndb = sqlite3.connect('/tmp/x.db')\n"
           "db.execute('create table t (x)')\ndb.execute('insert into t values (?)', (int(input()),))\ndb.commit()\n"
           "print(db.execute('select x + 1 from t').fetchone()[0])"),
    script("processes", "files, copies and maps", "import mmap, os, shutil\nopen('/tmp/a', 'w').write(input())\n"
           "shutil.copy('/tmp/a', '/tmp/b')\nwith open('/tmp/b', 'r+b') as f:\n    m = mmap.mmap(f.fileno(), 0)\n"
           "    print(int(m[:]) + 1)"),
    script("processes", "half of its memory", "x = bytearray(100 << 20)\nprint(int(input()) + 1 if len(x) > 1 else 0)"),
]  # fmt: skip
HONEST = [*OWN_CLASS, *CHANGED, *ATTRIBUTES, *FUNCTIONS, *ERRORS, *EQUALITY, *ROWS, *STYLES, *PROCESSES]

"""What a check expects is not taken from what the program changed.

A program may change its arguments, and checks of such programs look at them afterwards. But in

    data = [3, 1, 2]
    assert f(data) == sorted(data)

the list is where the check takes the expected value from: a program that empties it and returns nothing would be right.
So wherever one side of a comparison comes from the program and the other does not, the other side sees the arguments as
they were before a function changed them. The same holds for the arguments of a call, such as
`self.assertEqual(f(data), sorted(data))`. `assert data[:f(data)] == [1, 2]` has but one side that comes from the
program, and sees what it wrote.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterable, Sequence
from functools import lru_cache

from paddock.sandbox.inside.line import EXPECTED
from paddock.sandbox.inside.wire import LIBRARY

CANDIDATE = "candidate"  # what checks call the function under test by


@lru_cache(maxsize=4096)
def with_modules(checks: tuple[str, ...], setup: str) -> str:
    """Returns the setup with an import of each library module that the checks use without one: a `math` that the
    program defines is not the one that judges it."""
    try:
        nodes = [node for text in (setup, *checks) for node in ast.walk(ast.parse(text))]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return setup
    used = {node.value.id for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)}
    return "\n".join([setup, *(f"import {name}" for name in sorted(used & set(LIBRARY) - _defined(nodes)))])


@lru_cache(maxsize=4096)  # of a task's many answers each comes with the same checks
def guarded(checks: tuple[str, ...], setup: str) -> tuple[str, ...]:
    """The checks, with calls of EXPECTED where they are needed. One that Python cannot read stays as it is."""
    try:
        trees = [ast.parse(check) for check in checks]
        nodes = [list(ast.walk(tree)) for tree in trees]
        given = _defined(ast.walk(ast.parse(setup)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return checks
    own = given | {name for part in nodes for name in _defined(part)}
    programs = {node.id for part in nodes for node in part if isinstance(node, ast.Name)} - own - set(dir(builtins))
    done = []
    for check, tree, part in zip(checks, trees, nodes, strict=True):
        calls = [node for node in part if isinstance(node, ast.Call)]
        if judge := next((name for node in part if (name := _judge(node, {*programs, CANDIDATE}))), None):
            check = f"raise NameError({f'{judge} is not imported, and the program would judge itself by it'!r})"
        elif any(_passes_a_variable(call, programs) for call in calls):
            _guard(part, calls, {*programs, CANDIDATE})
            check = ast.unparse(tree)
        done.append(check)
    return tuple(done)


def _defined(nodes: Iterable[ast.AST]) -> set[str]:
    """Names that a text gives a meaning to; all others in it are the program's, or Python's."""
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            names.add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, ast.alias):
            names.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, ast.ExceptHandler) and node.name:
            names.add(node.name)
    return names - {CANDIDATE}


def _judge(node: ast.AST, programs: set[str]) -> str | None:
    """Returns `np` for `assert np.allclose(f(2), 4)`, if only the program says what `np` is."""
    test = node.test if isinstance(node, ast.Assert) else None
    while isinstance(test, ast.UnaryOp):
        test = test.operand
    if not (isinstance(test, ast.Call) and isinstance(test.func, ast.Attribute)):
        return None
    calls = [part for part in ast.walk(test) if isinstance(part, ast.Call) and part is not test]
    asked = any(isinstance(call.func, ast.Name) and call.func.id in programs for call in calls)
    name = test.func.value.id if isinstance(test.func.value, ast.Name) else ""
    return name if asked and name in programs and name.islower() else None


def _guard(nodes: Sequence[ast.AST], calls: Sequence[ast.Call], programs: set[str]) -> None:
    names = Names(nodes, programs)
    for node in nodes:
        if isinstance(node, ast.Compare):
            node.left, *node.comparators = _sides([node.left, *node.comparators], names)
    for call in calls:
        if not names.calls_own(call):
            count = len(call.args)
            values = _sides([*call.args, *(word.value for word in call.keywords)], names)
            call.args = values[:count]
            for word, value in zip(call.keywords, values[count:], strict=True):
                word.value = value


def _passes_a_variable(call: ast.Call, programs: set[str]) -> bool:
    """Only then can the program change what the check has."""
    values = [*call.args, *(word.value for word in call.keywords)]
    return any(
        isinstance(part, ast.Name) and part.id not in programs and (part is value or not hasattr(builtins, part.id))
        for value in values
        if not isinstance(value, ast.Constant)
        for part in ast.walk(value)
    )


def _sides(sides: list[ast.expr], names: Names) -> list[ast.expr]:
    come = [names.come_from_program(side) for side in sides]
    if all(come) or not any(come):
        return sides
    return [side if own else _expected(side) for side, own in zip(sides, come, strict=True)]


def _expected(side: ast.expr) -> ast.expr:
    if isinstance(side, ast.Constant | ast.Starred):
        return side
    parts = list(ast.walk(side))
    if any(isinstance(part, ast.Await | ast.Yield | ast.YieldFrom | ast.NamedExpr) for part in parts):
        return side  # these belong to the function around them
    if not any(isinstance(part, ast.Name) for part in parts):
        return side
    nothing = ast.arguments(posonlyargs=[], args=[], kwonlyargs=[], kw_defaults=[], defaults=[])
    later = ast.copy_location(ast.Lambda(nothing, side), side)
    function = ast.copy_location(ast.Name(EXPECTED, ast.Load()), side)
    return ast.copy_location(ast.Call(function, [later], []), side)


class Names:
    """Which names of a check have values that come from the program: its own, and all that is made with them."""

    def __init__(self, nodes: Sequence[ast.AST], programs: set[str]):
        self.known: dict[int, set[str]] = {}
        self.functions = {node.name: node for node in nodes if isinstance(node, ast.FunctionDef)}
        self.derived = set(programs)
        makers = [maker for node in nodes for maker in self._makers(node)]
        before = -1
        while len(self.derived) != before:
            before = len(self.derived)
            for used, made in makers:
                if not used.isdisjoint(self.derived):
                    self.derived |= made

    def come_from_program(self, node: ast.AST) -> bool:
        return not self._used([node]).isdisjoint(self.derived)

    def calls_own(self, call: ast.Call) -> bool:
        """A call of the program itself, which must get the very objects, or one of the check's own functions, whose
        comparisons are guarded."""
        local = isinstance(call.func, ast.Name) and call.func.id in {EXPECTED, *self.functions}
        return local or self.come_from_program(call.func)

    def _makers(self, node: ast.AST) -> list[tuple[set[str], set[str]]]:
        """Pairs of names: values of the latter are made with the former."""
        if isinstance(node, ast.Assign):
            return [(self._used([node.value]), self._used(node.targets))]
        if isinstance(node, ast.AnnAssign | ast.AugAssign | ast.NamedExpr):
            return [(self._used([node.value] if node.value else []), self._used([node.target]))]
        if isinstance(node, ast.For | ast.comprehension):
            return [(self._used([node.iter]), self._used([node.target]))]
        if isinstance(node, ast.withitem):
            return [(self._used([node.context_expr]), self._used([node.optional_vars] if node.optional_vars else []))]
        if isinstance(node, ast.FunctionDef):
            return [(self._used(node.body), {node.name})]
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in self.functions:
            parameters = self.functions[node.func.id].args
            given = zip([*parameters.posonlyargs, *parameters.args], node.args, strict=False)
            pairs = [(self._used([value]), {parameter.arg}) for parameter, value in given]
            return [*pairs, *((self._used([word.value]), {word.arg}) for word in node.keywords if word.arg)]
        return []

    def _used(self, nodes: Iterable[ast.AST]) -> set[str]:
        found: set[str] = set()
        for node in nodes:
            if id(node) not in self.known:
                self.known[id(node)] = {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
            found |= self.known[id(node)]
        return found

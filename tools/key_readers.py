"""Finds the modules that read each key of the config, from the package's source alone.

The types of expressions are followed from annotations: a parameter `config: Config`, a field `optim: OptimConfig`, a
local name that was assigned `config.data`. An attribute of an expression whose type is a dataclass of the schema is a
read of that field. Four more forms count: `getattr(section, "name")`; a field of a section that is handed to `vars`,
where the module has the field's name as a text; the text of a key in a module that looks keys up by text (`tree.get`,
or a table of texts); and `config.name` in the algorithms, whose `config` is any object with those names: it is read as
every key that ends so.

A section is followed by its path: `config.critic.optim.lr` is a read of that key alone. Only a parameter that is
annotated with a dataclass of several sections (an optimizer's keys are those of actor and critic) stands for all of
them.
"""

from __future__ import annotations

import ast
import dataclasses
import itertools
import typing
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from paddock.config import tree
from paddock.config.schema import Config

PACKAGE = Path(__file__).resolve().parent.parent / "paddock"
DECLARING = ("config.schema", "config.roles", "config.engine", "config.field", "config.tree", "config.recipes", "loading.load",
             "verl.keys")  # fmt: skip
"""These declare keys, or treat every key alike; `help` and `doctor` only show them."""
LEARNING = (ast.Assign, ast.AnnAssign, ast.NamedExpr, ast.For, ast.comprehension, ast.withitem)
LOOKUPS = ("tree.get(", "chosen.get(")
DUCK_TYPED, DUCK = "algorithms", "config"
Types = frozenset[str]
NONE: Types = frozenset()


ROOT = "Config"
"""Name of the whole config among the sections."""


@cache
def sections_of_schema() -> tuple[dict[str, dict[str, Types]], dict[str, Types]]:
    """Returns the fields of each section, with the section that a field is (none: a value), and the sections of each
    dataclass: an annotation that names a dataclass, or a base of it, means any of them."""
    shapes: dict[str, dict[str, Types]] = {}
    places: dict[str, Types] = {}

    def walk(kind: Any, section: str) -> None:
        types, prefix = typing.get_type_hints(kind), "" if section == ROOT else f"{section}."
        for ancestor in kind.__mro__:
            if dataclasses.is_dataclass(ancestor):
                places[ancestor.__name__] = places.get(ancestor.__name__, NONE) | {section}
        shapes[section] = {}
        for field in dataclasses.fields(kind):
            inner, key = types[field.name], f"{prefix}{field.name}"
            shapes[section][field.name] = frozenset({key}) if dataclasses.is_dataclass(inner) else NONE
            if dataclasses.is_dataclass(inner):
                walk(inner, key)

    walk(Config, ROOT)
    return shapes, places


def readers() -> dict[str, list[str]]:
    """Of each key the modules that read it, sorted; an empty list if none does."""
    texts = {module_of(path): path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}
    chosen = {name: ast.parse(text) for name, text in texts.items() if counts(name)}
    program = Program(chosen.values())
    found: dict[str, set[str]] = {key: set() for key in tree.leaves()}
    for name, source in chosen.items():
        reads = Reads(program, source, any(word in texts[name] for word in LOOKUPS))
        endings = set(duck_reads(source)) if name.startswith(f"{DUCK_TYPED}.") else set()
        for key in found:
            if any(key.endswith(f".{ending}") for ending in endings):
                found[key].add(name)
        for section, field in reads.found:
            key = field if section == ROOT else f"{section}.{field}"
            if key in found:
                found[key].add(name)
        for key in reads.texts & found.keys():
            found[key].add(name)
    return {key: sorted(modules) for key, modules in found.items()}


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")


def counts(module: str) -> bool:
    return module not in DECLARING and module.split(".")[0] not in ("help", "doctor", "compat")


class Program:
    """What the package's classes and functions say about types: of attributes, of results."""

    def __init__(self, sources: Iterable[ast.Module]):
        shapes, self.places = sections_of_schema()
        self.attributes: dict[str, dict[str, Types]] = {name: dict(fields) for name, fields in shapes.items()}
        self.bases: dict[str, list[str]] = {}
        self.results: dict[str, Types] = {}
        self.classes = set(self.places)
        trees = list(sources)
        nodes = [node for source in trees for node in ast.walk(source)]
        self.classes |= {node.name for node in nodes if isinstance(node, ast.ClassDef)}
        for node in nodes:
            if isinstance(node, ast.FunctionDef) and node.returns is not None:
                self.results[node.name] = self.results.get(node.name, NONE) | self.named(node.returns)
            elif isinstance(node, ast.ClassDef):
                self.declare(node)
        kinds = [node for node in nodes if isinstance(node, ast.ClassDef)]
        for _ in range(2):  # an attribute may come from another that is known only after the first pass
            for kind in kinds:
                self.assign(kind)

    def declare(self, node: ast.ClassDef) -> None:
        own = self.attributes.setdefault(node.name, {})
        self.bases.setdefault(node.name, []).extend(getattr(base, "id", "") for base in node.bases)
        for part in node.body:
            if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
                own[part.target.id] = own.get(part.target.id, NONE) | self.named(part.annotation)
            elif isinstance(part, ast.FunctionDef) and part.returns is not None and is_property(part):
                own[part.name] = own.get(part.name, NONE) | self.named(part.returns)

    def assign(self, node: ast.ClassDef) -> None:
        """`self.x = ...` in its methods."""
        own = self.attributes[node.name]
        for method in (part for part in node.body if isinstance(part, ast.FunctionDef)):
            scope = Scope(self, {"self": frozenset({node.name})}, method)
            for part in learning_nodes(method):
                for target in part.targets if isinstance(part, ast.Assign) else ():
                    for place, types in scope.pairs(target, part.value):
                        if isinstance(place, ast.Attribute) and getattr(place.value, "id", "") == "self" and types:
                            own[place.attr] = own.get(place.attr, NONE) | types

    def named(self, annotation: ast.expr) -> Types:
        """Returns the classes that an annotation names; of a list or a mapping those of what is in it."""
        names = set()
        for node in ast.walk(annotation):
            if isinstance(node, ast.Name | ast.Attribute):
                names.add(node.id if isinstance(node, ast.Name) else node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                names.add(node.value)
        return frozenset().union(*(self.instances(name) for name in names & self.classes))

    def instances(self, name: str) -> Types:
        """Returns the sections that a dataclass of the schema stands for; any other class stands for itself."""
        return self.places.get(name, frozenset({name}))

    def attribute(self, types: Types, name: str) -> Types:
        found: Types = NONE
        for kind in types:
            found |= self.attributes.get(kind, {}).get(name, NONE)
            found |= self.attribute(frozenset(self.bases.get(kind, ())) - {kind}, name)
        return found


def is_property(node: ast.FunctionDef) -> bool:
    return any(getattr(word, "id", getattr(word, "attr", "")) in ("property", "cached_property")
               for word in node.decorator_list)  # fmt: skip


@cache
def walked(function: ast.AST) -> tuple[list[Any], list[ast.arg]]:
    """Nodes of a function from which names get their types, and its annotated parameters."""
    nodes = [node for node in ast.walk(function) if isinstance(node, (*LEARNING, ast.arg))]
    parameters = [node for node in nodes if isinstance(node, ast.arg) and node.annotation is not None]
    return [node for node in nodes if not isinstance(node, ast.arg)], parameters


@cache
def narrowed(function: ast.AST) -> list[tuple[str, ast.expr]]:
    """Returns the names that `isinstance` tests in a function, and the classes that it asks for."""
    found = []
    for node in ast.walk(function):
        match node:
            case ast.Call(func=ast.Name(id="isinstance"), args=[ast.Name(id=name), kinds]):
                found.append((name, kinds))
    return found


def learning_nodes(function: ast.AST) -> list[Any]:
    return walked(function)[0]


class Scope:
    """Types of local names of one function; a name that is assigned twice has the types of both."""

    def __init__(self, program: Program, known: dict[str, Types], function: ast.AST):
        self.program, self.names, self.function = program, dict(known), function
        for node in walked(function)[1]:
            assert node.annotation is not None
            self.add(node.arg, program.named(node.annotation))
        for _ in range(2):
            for part in learning_nodes(function):
                self.learn(part)
        for subject, kinds in narrowed(function):
            self.names[subject] = self.names.get(subject, NONE) | program.named(kinds)

    def add(self, name: str, types: Types) -> None:
        self.names[name] = self.names.get(name, NONE) | types

    def learn(self, node: ast.AST) -> None:
        pairs: list[tuple[ast.expr, Types]] = []
        if isinstance(node, ast.Assign):
            pairs = [pair for target in node.targets for pair in self.pairs(target, node.value)]
        elif isinstance(node, ast.AnnAssign):
            pairs = [(node.target, self.program.named(node.annotation))]
        elif isinstance(node, ast.NamedExpr):
            pairs = [(node.target, self.type_of(node.value))]
        elif isinstance(node, ast.For | ast.comprehension):
            pairs = self.items(node.target, node.iter)
        elif isinstance(node, ast.withitem) and node.optional_vars is not None:
            pairs = [(node.optional_vars, self.type_of(node.context_expr))]
        for target, types in pairs:
            if isinstance(target, ast.Name):
                self.add(target.id, types)

    def pairs(self, target: ast.expr, value: ast.expr) -> list[tuple[ast.expr, Types]]:
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
            both = zip(target.elts, value.elts, strict=True)
            return [pair for one, other in both for pair in self.pairs(one, other)]
        if isinstance(target, ast.Tuple):
            return [(one, self.type_of(value)) for one in target.elts]
        return [(target, self.type_of(value))]

    def items(self, target: ast.expr, series: ast.expr) -> list[tuple[ast.expr, Types]]:
        """Of a loop: each element of a literal, else whatever the series holds."""
        if isinstance(series, ast.Tuple | ast.List):
            return [pair for element in series.elts for pair in self.pairs(target, element)]
        return self.pairs(target, series)

    def texts_of(self, node: ast.expr) -> set[str]:
        """A text, or those of the loop whose variable the node is."""
        if isinstance(node, ast.Constant):
            return {str(node.value)}
        name, found = getattr(node, "id", None), set[str]()
        for loop in learning_nodes(self.function):
            literal = isinstance(loop, ast.For | ast.comprehension) and isinstance(loop.iter, ast.Tuple)
            if literal and getattr(loop.target, "id", "") == name:
                found |= {str(word.value) for word in loop.iter.elts if isinstance(word, ast.Constant)}
        return found

    def type_of(self, node: ast.expr | None) -> Types:
        match node:
            case ast.Name(id=name):
                return self.names.get(name, NONE)
            case ast.Attribute(value=value, attr=name):
                return self.program.attribute(self.type_of(value), name)
            case ast.Call(func=ast.Name(id="getattr"), args=[value, ast.Constant(value=str(name)), *_]):
                return self.program.attribute(self.type_of(value), name)
            case ast.Call(func=function, args=arguments):
                name = getattr(function, "id", getattr(function, "attr", ""))
                if name in self.program.classes:
                    return self.program.instances(name)
                if name in ("cast", "replace", "deepcopy"):
                    return frozenset().union(*(self.type_of(value) for value in arguments))
                return self.program.results.get(name, NONE)
            case ast.Subscript(value=value):
                return self.type_of(value)
            case ast.Await(value=value) | ast.Starred(value=value) | ast.NamedExpr(value=value):
                return self.type_of(value)
            case ast.IfExp(body=body, orelse=other):
                return self.type_of(body) | self.type_of(other)
            case ast.BoolOp(values=values) | ast.Tuple(elts=values) | ast.List(elts=values):
                return frozenset().union(*map(self.type_of, values))
            case ast.Dict(values=values):
                return frozenset().union(*map(self.type_of, values))
        return NONE


class Reads:
    """Fields of the schema's dataclasses that one module reads, and keys that it looks up by their text."""

    def __init__(self, program: Program, source: ast.Module, looks_up: bool):
        self.program, self.found = program, set[tuple[str, str]]()
        self.words = {node.value for node in ast.walk(source) if isinstance(node, ast.Constant)}
        self.visit(source, Scope(program, {}, ast.Module([], [])), None)
        self.texts = set(key_texts(source)) if looks_up else set[str]()

    def visit(self, node: ast.AST, scope: Scope, owner: str | None) -> None:
        if isinstance(node, ast.ClassDef):
            owner = node.name
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            known = dict(scope.names) | ({"self": frozenset({owner}), "cls": frozenset({owner})} if owner else {})
            scope = Scope(self.program, known, node)
        self.read(node, scope)
        for child in ast.iter_child_nodes(node):
            self.visit(child, scope, owner)

    def read(self, node: ast.AST, scope: Scope) -> None:
        match node:
            case ast.Attribute(value=value, attr=name, ctx=ast.Load()):
                self.found |= {(kind, name) for kind in scope.type_of(value)}
            case ast.Call(func=ast.Name(id="getattr"), args=[value, wanted, *_]):
                self.found |= {(kind, name) for kind in scope.type_of(value) for name in scope.texts_of(wanted)}
            case ast.Call(func=ast.Name(id="vars"), args=[value]):
                fields = {kind: self.program.attributes.get(kind, {}) for kind in scope.type_of(value)}
                self.found |= {(kind, name) for kind, names in fields.items() for name in names.keys() & self.words}


def duck_reads(source: ast.Module) -> Iterator[str]:
    """Dotted names that are read of a `config`, also through a local name for a part of it: policy_loss.clip_cov_lb."""
    parts = {DUCK: ""}
    for node in learning_nodes(source):
        if isinstance(node, ast.Assign):
            target, value = node.targets[0], node.value
            several = isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple)
            for one, other in zip(target.elts, value.elts, strict=True) if several else [(target, value)]:
                if isinstance(one, ast.Name) and (name := dotted(other, parts)):
                    parts[one.id] = f"{name}."
    for inner in ast.walk(source):
        match inner:
            case ast.Attribute() if name := dotted(inner, parts):
                yield name
            case ast.Call(func=ast.Name(id="getattr"), args=[value, ast.Constant(value=str(last)), *_]):
                if (name := dotted(value, parts)) or getattr(value, "id", "") in parts:
                    yield f"{name}.{last}" if name else last


def dotted(node: ast.expr, parts: dict[str, str]) -> str | None:
    names: list[str] = []
    while isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
        names.insert(0, node.attr)
        node = node.value
    return parts[node.id] + ".".join(names) if names and isinstance(node, ast.Name) and node.id in parts else None


def key_texts(source: ast.Module) -> Iterator[str]:
    """Texts of a module, with the module's constants filled into f-strings: f"{_RO}.dtype"."""
    known: dict[str, Any] = {}
    for node in source.body:
        if isinstance(node, ast.Assign):
            with suppress(Exception):  # whatever needs more than constants is none
                exec(compile(ast.Module([node], []), "constants", "exec"), {"__builtins__": {"tuple": tuple}}, known)
    loops: dict[str, list[str]] = {}
    for loop in learning_nodes(source):
        if isinstance(loop, ast.For) and isinstance(loop.target, ast.Name) and isinstance(loop.iter, ast.Tuple):
            words = [word.value for word in loop.iter.elts if isinstance(word, ast.Constant)]
            loops.setdefault(loop.target.id, []).extend(map(str, words))
    for inner in ast.walk(source):
        if isinstance(inner, ast.Constant) and isinstance(inner.value, str):
            yield inner.value
        elif isinstance(inner, ast.JoinedStr):
            yield from map("".join, itertools.product(*(parts_of(part, known, loops) for part in inner.values)))


def parts_of(part: ast.expr, known: dict[str, Any], loops: dict[str, list[str]]) -> list[str]:
    """What may stand in this place of an f-string."""
    if isinstance(part, ast.Constant):
        return [str(part.value)]
    name = getattr(getattr(part, "value", None), "id", "")
    return [str(known[name])] if name in known else loops.get(name, ["\0"])

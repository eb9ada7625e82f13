"""The reference of the library: generated from the signatures and docstrings of what `import paddock` exports.

    python tools/api_reference.py           # after a change of an exported name, its signature or its docstring

It writes docs/en/api.md and docs/zh/api.md. A method or property is in the reference if its docstring has an example,
and tests/docs/test_api.py runs all examples.
"""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, get_type_hints

sys.path.insert(0, str(Path(__file__).resolve().parent))
from keys_reference import translations

import paddock
from paddock.config import tree
from paddock.library.keywords import KEYS, Keywords

ROOT = Path(__file__).resolve().parent.parent
PROMPT = ">>> "
WIDTH = 100
PROPERTIES = (property, cached_property)


@dataclass(frozen=True)
class Language:
    """The words of one page."""

    file: Path
    title: str
    opening: str
    field_columns: str
    keyword_columns: str
    keywords: str
    meanings: dict[str, str]
    """Sentences that stand before the docstrings."""


ENGLISH = Language(
    file=ROOT / "docs" / "en" / "api.md",
    title="Python API",
    opening="""\
[中文](../zh/api.md)

What `import paddock` gives: {names}.

This page is generated from signatures and docstrings by `make api-reference`; tests hold it to them and run every
example. Examples of a class build on each other, from its first one. [The guide](library.md) tells how the parts work
together.
""",
    field_columns="field | type | meaning",
    keyword_columns="keyword | type | key | meaning",
    keywords="Keywords of `Run`",
    meanings={},
)
CHINESE = Language(
    file=ROOT / "docs" / "zh" / "api.md",
    title="Python 接口",
    opening="""\
[English](../en/api.md)

`import paddock` 提供的名字：{names}。

本页由 `make api-reference` 根据签名和文档字符串生成；有测试保证本页与代码一致，并运行每个例子。
同一个类的例子从第一个起前后相接。每一项先用中文说明，其后是代码里的英文原文。各部分怎样配合，见[指南](library.md)。
""",
    field_columns="字段 | 类型 | 含义",
    keyword_columns="关键字 | 类型 | 键 | 含义",
    keywords="`Run` 的关键字",
    meanings={
        "Run": "一次训练：模型、数据、奖励和算法。",
        "Run.config": "完整的配置，与训练读到的一致。",
        "Run.folder": "存放指标、样本和检查点的文件夹。",
        "Run.plan": "不开始训练，先看会做什么：步数、显存、时间和建议。",
        "Run.train": "训练剩下的所有步。Ctrl-C 在当前步之后停下并写检查点，再次调用就接着训练。",
        "Run.__iter__": "逐步训练：每次迭代给出一个 `Step`。",
        "Run.evaluate": "用当前权重在给定的行上计算指标；不给行时用 `validation`。",
        "Run.generate": "对一个提示给出 `n` 个回答；给一列提示时，得到列表的列表。",
        "Run.export": "把当前权重和分词器写到 `transformers` 能加载的文件夹。",
        "Run.save": "为最后完成的一步写检查点；已有则不重写。",
        "Run.report": "写出这次训练的报告页，返回它的位置。",
        "Run.sample": "用当前权重采样：得到带 token、对数概率和文本的 `Episode`。",
        "Run.score": "用这次训练的奖励打分，得到一个 `Batch`。",
        "Run.advantages": "用这次训练的算法补上对数概率、价值和优势。",
        "Run.learn": "用带优势的批更新权重，算作一步：会记录，到时候会保存。",
        "Run.sync": "把当前权重交给自带一份权重副本的引擎；`sample` 在需要时也会这样做。",
        "Run.close": "结束进程、归还内存。之后调用任何方法都会从最新的检查点重新打开。",
        "UserError": "调用者能自己改正的错误：键、值、原因和改法。",
        "Step": "训练完的一步：迭代 `Run` 时得到它，`on_step` 也收到它。",
        "Step.samples": "这一步的回答及得分，解码成文本。",
        "Outcome": "一次训练调用怎样结束：`Run.train` 的返回值。",
        "Checkpoint": "磁盘上的一个检查点。",
        "Sample": "一个回答的文本和得分。",
        "Batch": "一步的所有行：按名字存放的列，每个采样的回答占一行。B 是行数，P 和 R 是提示与回答的 token 数。",
        "Batch.columns": "已经填好的列。",
        "Batch.need": "取一列；还没填时抛出 ValueError。",
        "Batch.with_": "填入或替换几列，返回新的批；其余的列共用，不复制。",
        "Batch.rows": "按位置取行：下标张量、布尔掩码或切片。",
        "Batch.to": "把所有列放到一个设备上。",
        "Batch.concat": "把几个批的行接在一起：提示左填充，回答右填充。",
        "Episode": "对一个提示写下的全部内容。",
        "Span": "由策略或环境连续写下的 token。",
        "Environment": "环境：提出问题，回应策略的每一轮，并付给奖励。继承它，只改需要的方法。",
        "Environment.reset": "返回 episode 的提示；None：用数据行的提示。同一组的种子相同，每一步另换。",
        "Environment.step": "返回策略一轮之后的内容：`Turn`、接下来的消息，或 None 表示结束。",
        "Environment.reward": "返回整个 episode 的奖励，付在策略的最后一个 token 上，与各轮的奖励相加。",
        "Environment.close": "释放 episode 占用的东西；无论怎样结束都调用一次。",
        "Environment.tools": "返回策略可以调用的工具；默认是用 `tool` 标记的方法。",
        "Answer": "策略的一轮：文本、token 和其中的工具调用。",
        "Turn": "环境对策略一轮的回应：接下来的消息、这一轮的奖励、是否结束。",
        "Ended": "一个结束的 episode，`Environment.reward` 读到的就是它。",
        "tool": "把一个函数，或环境的一个方法，标为工具；它的 schema 来自类型和文档字符串。",
        "ToolError": "由工具抛出，告诉策略哪里不对；其他异常也会告诉策略。",
        "estimator": "把一个函数登记为算法（优势估计），供 `Run(algorithm=名字)` 使用。",
        "policy_loss": "把一个函数登记为策略损失，用 `actor_rollout_ref.actor.policy_loss.loss_mode` 选用。",
        "scorer": "把一个函数登记为奖励，供 `Run(reward=名字)` 使用。",
        "logger": "把一个类登记为日志，供 `Run(logger=[名字])` 使用。",
    },
)


def main() -> int:
    for file, text in files().items():
        file.write_text(text, encoding="utf-8")
        print(file.relative_to(ROOT))
    return 0


def files() -> dict[Path, str]:
    """Everything that is generated, by its file."""
    return {language.file: page(language) for language in (ENGLISH, CHINESE)}


def page(language: Language) -> str:
    names = ", ".join(f"[`{name}`](#{name.lower()})" for name in paddock.EXPORTS)
    parts = [f"# {language.title}\n\n{language.opening.format(names=names)}"]
    for name in paddock.EXPORTS:
        exported = getattr(paddock, name)
        parts.append(f"## `{name}`\n\n{described(name, exported, language)}")
        if is_dataclass(exported):
            parts.append(field_table(exported, language))
        for member, value in members(exported):
            whole = f"{name}.{member}"
            parts.append(f"### `{whole}`\n\n{described(whole, value, language)}")
        if name == "Run":
            parts.append(f"### {language.keywords}\n\n{keyword_table(language)}")
    return "\n".join(parts)


def members(exported: Any) -> Iterator[tuple[str, Any]]:
    """Methods and properties that have an example, in the order of the source."""
    for name, value in vars(exported).items() if inspect.isclass(exported) else ():
        value = value.__func__ if isinstance(value, staticmethod) else value
        if (inspect.isfunction(value) or isinstance(value, PROPERTIES)) and PROMPT in (value.__doc__ or ""):
            yield name, value


def examples(name: str) -> Iterator[tuple[str, str]]:
    """Docstrings of an exported name and of its members, by their names; they run in one namespace, in this order."""
    exported = getattr(paddock, name)
    yield name, inspect.getdoc(exported) or ""
    for member, value in members(exported):
        yield f"{name}.{member}", inspect.getdoc(value) or ""


def described(name: str, value: Any, language: Language) -> str:
    meaning = f"{language.meanings[name]}\n\n" if language.meanings else ""
    return f"```python\n{signature(name, value)}\n```\n\n{meaning}{markdown(inspect.getdoc(value) or '')}"


def signature(name: str, value: Any) -> str:
    """Returns how something is called, as the source has it."""
    if isinstance(value, PROPERTIES):
        getter = value.fget if isinstance(value, property) else value.func
        return f"{name}: {ast.unparse(definition(getter).returns)}"  # type: ignore[arg-type]
    if inspect.isclass(value):
        if is_dataclass(value) or not inspect.isfunction(value.__init__):
            return f"class {name}"
        value, returned = value.__init__, None
        found = definition(value)
    else:
        found = definition(value)
        returned = found.returns
    taken = [*arguments(found.args)]
    end = "" if returned is None else f" -> {ast.unparse(returned)}"
    line = f"{name}({', '.join(taken)}){end}"
    return line if len(line) <= WIDTH else f"{name}(\n" + "".join(f"    {one},\n" for one in taken) + f"){end}"


def definition(function: Any) -> ast.FunctionDef:
    source = textwrap.dedent(inspect.getsource(function))
    return next(node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef))


def arguments(args: ast.arguments) -> Iterator[str]:
    """Each argument but `self`, with its type and default."""
    placed = [*args.posonlyargs, *args.args]
    defaults: list[ast.expr | None] = [*[None] * (len(placed) - len(args.defaults)), *args.defaults]
    for argument, default in zip(placed, defaults, strict=True):
        if argument.arg != "self":
            yield one_argument(argument, default)
    if args.vararg:
        yield f"*{ast.unparse(args.vararg)}"
    elif args.kwonlyargs:
        yield "*"
    for argument, default in zip(args.kwonlyargs, args.kw_defaults, strict=True):
        yield one_argument(argument, default)
    if args.kwarg:
        yield f"**{ast.unparse(args.kwarg)}"


def one_argument(argument: ast.arg, default: ast.expr | None) -> str:
    return ast.unparse(argument) + ("" if default is None else f" = {ast.unparse(default)}")


def markdown(docstring: str) -> str:
    """Returns a docstring with its examples in blocks."""
    parts = []
    for paragraph in docstring.replace("``", "`").split("\n\n"):
        text = textwrap.dedent(paragraph).strip("\n")
        parts.append(f"```pycon\n{text}\n```" if text.startswith(PROMPT.strip()) else text)
    return "\n\n".join(parts) + "\n"


def field_table(exported: Any, language: Language) -> str:
    """Fields of a dataclass with their types, and the texts below them."""
    body = ast.parse(textwrap.dedent(inspect.getsource(exported))).body[0].body  # type: ignore[attr-defined]
    texts, types = {}, {}
    for node, behind in zip(body, [*body[1:], None], strict=True):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            types[node.target.id] = ast.unparse(node.annotation)
            said = isinstance(behind, ast.Expr) and isinstance(behind.value, ast.Constant)
            texts[node.target.id] = " ".join(str(behind.value.value).split()) if said else ""  # type: ignore[union-attr]
    rows = [(f"`{f.name}`", f"`{types[f.name]}`", texts[f.name].replace("``", "`")) for f in fields(exported) if f.repr]
    return table(language.field_columns, rows)


def keyword_table(language: Language) -> str:
    types = {name: inspect.formatannotation(kind) for name, kind in get_type_hints(Keywords).items()}
    types = {name: text.removeprefix("collections.abc.") for name, text in types.items()}
    meanings = {key: leaf.metadata["meaning"] for key, leaf in tree.leaves().items()}
    meanings |= translations() if language is CHINESE else {}
    rows = [(f"`{name}`", f"`{types[name]}`", f"`{key}`", meanings[key]) for name, key in KEYS.items()]
    return table(language.keyword_columns, rows)


def table(columns: str, rows: list[tuple[str, ...]]) -> str:
    rule = "|".join("---" for _ in columns.split("|"))
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join([f"| {columns} |", f"|{rule}|", *lines]) + "\n"


if __name__ == "__main__":
    sys.exit(main())

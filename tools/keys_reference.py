"""The reference of every key, and what help knows about keys: generated from the schema.

    python tools/keys_reference.py           # after a change of the schema

It writes docs/en/keys.md, docs/zh/keys.md and paddock/help/known.json. Chinese meanings are in tools/meanings_zh.json,
each beside the English one that it translates; where that has changed, the page shows English until it is translated.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paddock.config import tree
from paddock.data.prepare import NAMES
from paddock.help.completion import KNOWN
from paddock.help.entry import COMMANDS, KeyEntry, entries
from paddock.models.get import CATALOGUE

ROOT = Path(__file__).resolve().parent.parent
MEANINGS = Path(__file__).with_name("meanings_zh.json")


@dataclass(frozen=True)
class Language:
    """The words of one page."""

    file: Path
    title: str
    opening: str
    columns: tuple[str, ...]
    follows: str
    unset: str
    types: dict[str, str]
    sections: dict[str, str]


ENGLISH = Language(
    file=ROOT / "docs" / "en" / "keys.md",
    title="Every key",
    opening="""\
[中文](../zh/keys.md)

{count} keys in {sections} sections, generated from the schema by `make keys-reference`; a test holds this page to it.
`paddock keys WORD` finds keys by name and meaning, and also says which commands read them.

- A default of `unset` means that something else decides; the meaning says what. `= key` takes the value of that key.
- An algorithm's recipe, the embedded default and some commands set other defaults: `paddock plan` shows each value of a
  run with where it came from.
""",
    columns=("key", "type", "default", "limits", "meaning"),
    follows="= ",
    unset="unset",
    types={},
    sections={},
)
CHINESE = Language(
    file=ROOT / "docs" / "zh" / "keys.md",
    title="全部配置键",
    opening="""\
[English](../en/keys.md)

共 {count} 个键，分 {sections} 节，由 `make keys-reference` 根据配置模式生成；有测试保证本页与代码一致。
`paddock keys WORD` 可按名称和含义查找键，并列出读取它的命令。

- 默认值为 `未设`，表示由其他因素决定，含义一栏会说明；`= 键` 表示取另一个键的值。
- 算法配方、内置默认任务以及部分命令会给出其他默认值：`paddock plan` 会列出一次运行的每个值及其来源。
- {translated} 个键的含义已译成中文；其余（主要是很少由用户设置的键）保留英文。
""",
    columns=("键", "类型", "默认值", "取值限制", "含义"),
    follows="= ",
    unset="未设",
    types={
        "path or list of paths": "路径或路径列表",
        "list of paths": "路径列表",
        "list of texts": "文本列表",
        "list of whole numbers": "整数列表",
        "list of numbers": "数值列表",
        "whole number": "整数",
        "True or False": "True 或 False",
        "number or text": "数值或文本",
        "number": "数值",
        "mapping": "映射",
        "anything": "任意",
        "path": "路径",
        "text": "文本",
    },
    sections={
        "data": "数据",
        "actor_rollout_ref": "策略、采样与参考模型",
        "actor_rollout_ref.model": "模型",
        "actor_rollout_ref.actor": "策略（actor）的训练",
        "actor_rollout_ref.ref": "参考模型",
        "actor_rollout_ref.rollout": "采样（rollout）",
        "critic": "价值模型（critic）",
        "reward_model": "奖励",
        "custom_reward_function": "自定义奖励函数",
        "algorithm": "算法",
        "distillation": "蒸馏",
        "trainer": "训练过程",
        "ray_kwargs": "Ray",
    },
)


def main() -> int:
    for file, text in files().items():
        file.write_text(text, encoding="utf-8")
        print(file.relative_to(ROOT))
    if old := outdated():
        print(f"{len(old)} Chinese meanings translate an English one that has changed: {', '.join(old)}")
    return 0


def files() -> dict[Path, str]:
    """Everything that is generated, by its file."""
    return {
        KNOWN: known(),
        ENGLISH.file: page(ENGLISH, {}),
        CHINESE.file: page(CHINESE, translations()),
    }


def known() -> str:
    """Returns the file with a line for each key, command and list of names."""
    keys: dict[str, dict[str, object]] = {}
    for key, entry in entries().items():
        about = {"values": [*entry.choices], "path": entry.path}
        keys[key] = {name: value for name, value in about.items() if value}
    commands = {
        name: {"reads": [*command.reads] if command else ["*"], "names": dict(command.names) if command else {}}
        for name, command in COMMANDS.items()
    }
    arguments = {"data": [*NAMES], "models": [*CATALOGUE]}
    parts: dict[str, Any] = {"keys": keys, "commands": commands, "arguments": arguments}

    def lines(inside: dict[str, Any]) -> str:
        return ",\n".join(f"{json.dumps(name)}: {json.dumps(about)}" for name, about in inside.items())

    sections = (f"{json.dumps(part)}: {{\n{lines(inside)}" for part, inside in parts.items())
    return "{\n" + "\n},\n".join(sections) + "\n}\n}\n"


def page(language: Language, meanings: dict[str, str]) -> str:
    counts = {
        "count": len(entries()),
        "sections": len([*groups()]),
        "translated": len(meanings),
    }
    parts = [f"# {language.title}\n\n{language.opening.format(**counts)}"]
    for section, inside in groups():
        heading = f"{language.sections[section]}：`{section}`" if section in language.sections else f"`{section}`"
        level = "##" if section.count(".") < 2 else "###"
        rule = "|".join("---" for _ in language.columns)
        rows = "\n".join(row(language, entry, section, meanings) for entry in inside)
        parts.append(f"{level} {heading}\n\n| {' | '.join(language.columns)} |\n|{rule}|\n{rows}\n")
    return "\n".join(parts)


def groups() -> Iterator[tuple[str, list[KeyEntry]]]:
    """Keys by the section that they stand in directly, in the order of the schema."""
    found: dict[str, list[KeyEntry]] = {}
    for key, entry in entries().items():
        found.setdefault(key.rpartition(".")[0] or key, []).append(entry)
    yield from found.items()


def row(language: Language, entry: KeyEntry, section: str, meanings: dict[str, str]) -> str:
    name = f"`{entry.key.removeprefix(f'{section}.')}`"
    kind = entry.type
    for english, other in language.types.items():
        kind = kind.replace(english, other)
    if entry.default == "unset":
        default = language.unset
    elif entry.default.startswith("= "):
        default = f"{language.follows}`{entry.default[2:]}`"
    else:
        default = f"`{entry.default}`"
    cells = [name, kind, default, entry.limits.replace("one of ", ""), meanings.get(entry.key, entry.meaning)]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def translations() -> dict[str, str]:
    """Chinese meanings by key: each stands for all keys of the same last name and the same English meaning."""
    stored = json.loads(MEANINGS.read_text(encoding="utf-8"))
    by_meaning = {(key.rpartition(".")[2], english): chinese for key, (english, chinese) in stored.items()}
    found = {(key, entry.meaning): (key.rpartition(".")[2], entry.meaning) for key, entry in entries().items()}
    return {key: by_meaning[place] for (key, _), place in found.items() if place in by_meaning}


def outdated() -> list[str]:
    stored = json.loads(MEANINGS.read_text(encoding="utf-8"))
    now = {key: leaf.metadata["meaning"] for key, leaf in tree.leaves().items()}
    return [key for key, (english, _) in stored.items() if now.get(key) != english]


if __name__ == "__main__":
    raise SystemExit(main())

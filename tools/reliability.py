"""Writes the counts of docs/reliability/*.json, which `make test-chaos` made, into the tables of the reliability pages.

python tools/reliability.py
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RECORDS = ROOT / "docs" / "reliability"
PAGES = {language: ROOT / "docs" / language / "reliability.md" for language in ("en", "zh")}
TITLES = {
    "grpo": "GRPO", "ppo": "PPO", "rloo": "RLOO", "lora": "GRPO, LoRA", "sft": "SFT", "rm": "reward model",
    "ray": "PPO, Ray ranks",
}  # fmt: skip
RANDOM = "random moment"
HEADS = {
    "en": {
        "kills": ("what trains", "runs", "kills", "at random moments", "at named points"),
        "points": ("named point", "kills"),
        "invocations": (
            "kind of mistake",
            "invocations",
            "exit code 2",
            "tracebacks",
            "hangs",
            "left something behind",
        ),
        "all": "**all**",
    },
    "zh": {
        "kills": ("训练什么", "运行", "杀死次数", "随机时刻", "指定位置"),
        "points": ("指定位置", "杀死次数"),
        "invocations": ("误操作的种类", "次数", "退出码 2", "traceback", "挂起", "留下残余"),
        "all": "**合计**",
    },
}


def read(name: str) -> dict[str, Any]:
    return json.loads((RECORDS / f"{name}.json").read_text())


def kills(words: dict[str, Any]) -> str:
    rows = []
    for job, title in TITLES.items():
        found = read("kills")[job]
        total, random = sum(found["kills"].values()), found["kills"].get(RANDOM, 0)
        rows.append([title, found["runs"], total, random, total - random])
    sums = [sum(row[column] for row in rows) for column in range(1, 5)]
    return table(words["kills"], [*rows, [words["all"], *sums]])


def points(words: dict[str, Any]) -> str:
    counts: dict[str, int] = {}
    for found in read("kills").values():
        for point, count in found["kills"].items():
            counts[point] = counts.get(point, 0) + count
    counts.pop(RANDOM, None)
    return table(words["points"], [list(item) for item in sorted(counts.items(), key=lambda item: (-item[1], item[0]))])


def invocations(words: dict[str, Any]) -> str:
    columns = ("invocations", "exit code 2", "tracebacks", "hangs", "left something behind")
    rows = [[kind, *(found[column] for column in columns)] for kind, found in read("invocations")["kinds"].items()]
    sums = [sum(row[column] for row in rows) for column in range(1, 6)]
    return table(words["invocations"], [*rows, [words["all"], *sums]])


def table(head: tuple[str, ...], rows: list[list[Any]]) -> str:
    lines = [list(head), ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


TABLES = {"kills": kills, "points": points, "invocations": invocations}


def written(page: str, language: str) -> str:
    """Returns the page with every table made anew."""
    for name, make in TABLES.items():
        begin, end = f"<!-- {name}: written by `python tools/reliability.py` -->", f"<!-- end of {name} -->"
        text = f"{begin}\n{make(HEADS[language])}\n{end}"
        page, count = re.subn(f"{re.escape(begin)}.*?{re.escape(end)}", lambda _, text=text: text, page, flags=re.S)
        assert count == 1, (language, name)
    return page


def main() -> None:
    for language, path in PAGES.items():
        path.write_text(written(path.read_text(), language))


if __name__ == "__main__":
    main()

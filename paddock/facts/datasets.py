"""Public data sets that recipes name, with the row counts of their published files: a plan needs no download."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import PurePosixPath

SPLIT_NAMES = {"train": "train", "test": "test", "validation": "validation", "val": "validation"}


@dataclass(frozen=True)
class KnownDataset:
    name: str
    splits: Mapping[str, int]  # rows of each published split
    aliases: tuple[str, ...] = ()  # other names of its folder or file
    preparer: str | None = None  # `paddock data <preparer>` writes it
    folder: str = ""  # its folder in the path that was looked up
    split: str | None = None  # the split that path names

    @property
    def rows(self) -> int | None:
        """The rows of the split that the path names; None if it names none, or another."""
        return self.splits.get(self.split or "")

    @property
    def prepare_command(self) -> str | None:
        """The command that writes the files the path expects, where Paddock has one."""
        if self.preparer is None:
            return None
        folder = self.folder or f"~/data/{self.name}"
        return f"paddock data {self.preparer} --local_save_dir " + (f'"{folder}"' if " " in folder else folder)


TABLE = (
    *(
        KnownDataset(name, {"train": 7473, "test": 1319}, preparer=name)
        for name in (
            *("gsm8k", "gsm8k_sft", "gsm8k_calculator", "gsm8k_calculator_sft", "gsm8k_calculator_text_sft"),
            *("gsm8k_tool_agent_loop", "gsm8k_multiturn_w_tool"),
        )
    ),
    KnownDataset("math", {"train": 7500, "test": 5000}, preparer="math"),
    KnownDataset("math-500", {"test": 500}, ("math500",)),  # HuggingFaceH4/MATH-500
    KnownDataset("geo3k", {"train": 2101, "validation": 300, "test": 601}, ("geometry3k",), "geo3k"),
    KnownDataset("full_hh_rlhf", {"train": 112052, "test": 12451}, ("full_hh_rlhf/rl",), "full_hh_rlhf --split rl"),
    KnownDataset("hellaswag", {"train": 39905, "validation": 10042}),  # Rowan/hellaswag
    KnownDataset("deepscaler", {"train": 40315}, ("deepscaler-preview-dataset",)),  # agentica-org
    # of BytedTsinghua-SIA: 17 thousand problems, 100 times each, and 30 problems, 32 times each
    KnownDataset("dapo-math-17k", {"train": 1791700}),
    KnownDataset("aime-2024", {"test": 960}),
    KnownDataset("Eurus-2-RL-Data", {"train": 480537, "validation": 2048}),  # PRIME-RL
    KnownDataset("humaneval", {"test": 164}, preparer="humaneval"),
    KnownDataset("mbpp", {"train": 374, "validation": 90, "test": 500}, preparer="mbpp"),
)


def known_dataset(path: object) -> KnownDataset | None:
    """Returns the data set a path names by its folder, `~/data/gsm8k/train.parquet`, or its file,
    `dapo-math-17k.parquet`."""
    file = PurePosixPath(str(path))
    stem = _plain(file.stem)
    parts = [_plain(part) for part in file.parent.parts]
    for folder in ("/".join(parts[-2:]), "/".join(parts[-1:])):
        if known := BY_NAME.get(folder):
            return replace(known, folder=str(file.parent), split=SPLIT_NAMES.get(stem) or _only_split(known, stem))
    known = BY_NAME.get(stem)
    return known and replace(known, split=_only_split(known, stem))


def _only_split(known: KnownDataset, stem: str) -> str | None:
    """A file that carries the data set's name holds all of it: a split only where it has just one."""
    return next(iter(known.splits)) if len(known.splits) == 1 and BY_NAME.get(stem) == known else None


def _plain(name: str) -> str:
    return name.lower().replace("_", "-")


BY_NAME = {_plain(name): known for known in TABLE for name in (known.name, *known.aliases)}

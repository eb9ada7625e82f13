"""Counts which public environments of the installed packages run: an episode of each is begun, answered and paid.

    python tools/count_environments.py                       textarena, gem, skyrl_gym, reasoning_gym: their registries
    python tools/count_environments.py verifiers=FOLDER      and each package of tasksets in a folder, for instance
                                                             `environments/` of a checkout of verifiers

The policy writes the same short text in each turn, at most `TURNS` times. An environment runs if its rewards are finite
numbers. It prints a line for each one that does not, with the reason, and a table. What the machine lacks is counted
by itself: data of a hub, word lists, other packages, a later Python, keys of an API, containers.
"""

from __future__ import annotations

import importlib
import math
import os
import re
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from paddock.environments.catalogue import environment_of
from paddock.environments.environment import Answer, Ended, messages_said, turn_of
from paddock.errors import UserError

SECONDS, TURNS = 120.0, 3
ROW = {"prompt": "What is 2 + 2?", "ground_truth": "4", "data_source": "", "question": "What is 2 + 2?"}
ABSENT = re.compile(
    "Hub|ownload|No module|needs the module|container|onnect|NLTK|nltk|No words|No such file|not found|API key|"
    "SyntaxError|errors in a Task"
)
SETTINGS: Mapping[str, Mapping[str, Any]] = {"verifiers:code_golf": {"attempts": 1}}


def names(package: str, folder: str) -> Iterator[str]:
    """Yields the names under which Paddock knows a package's environments, without variants of one game."""
    if package == "verifiers":
        for found in sorted(Path(folder).resolve().glob("*/pyproject.toml")):
            sys.path.insert(0, str(found.parent))
            os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(found.parent), os.environ.get("PYTHONPATH")]))
            yield found.parent.name
    elif package == "reasoning_gym":
        yield from sorted(importlib.import_module("reasoning_gym.factory").DATASETS)
    elif package == "textarena":
        known = importlib.import_module("textarena.envs.registration").ENV_REGISTRY
        yield from sorted(name for name in known if name.endswith("-v0"))
    elif package == "gem":
        importlib.import_module("gem")
        yield from sorted(importlib.import_module("gem.envs.registration").ENV_REGISTRY)
    else:
        yield from sorted(importlib.import_module("skyrl_gym.envs.registration").registry)


def play(name: str) -> float:
    """Plays an episode, and returns what it paid."""
    environment = environment_of(name, SETTINGS.get(name), SECONDS).make()
    try:
        asked = environment.reset(ROW, seed=7)
        said, answers, total, done = messages_said(asked or ROW["prompt"]), [], 0.0, False
        while not done and len(answers) < TURNS:
            answers.append(Answer("0", number=len(answers)))
            turn = turn_of(environment.step(answers[-1]))
            total, done = total + float(turn.reward), turn.done
            said += [{"role": "assistant", "content": "0"}, *messages_said(turn.messages)]
        return total + float(environment.reward(Ended(ROW, said, answers, done)))
    finally:
        environment.close()


def outcome(name: str) -> str:
    """Returns "" if the environment runs, otherwise the reason."""
    found: list[str] = []

    def work() -> None:
        try:
            found.append("" if math.isfinite(paid := play(name)) else f"pays {paid}")
        except UserError as error:
            found.append(f"refused: {error.reason}")
        except Exception as error:  # whatever a package raises is an answer
            found.append(f"raised {type(error).__name__}: {error}")

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(2 * SECONDS)
    return found[0] if found else f"took longer than {2 * SECONDS:g} s"


def main(arguments: list[str]) -> None:
    asked = [one.partition("=")[::2] for one in arguments or ("textarena", "gem", "skyrl_gym", "reasoning_gym")]
    table = ["| package | tried | ran | need what is not here | refused |", "|---|---|---|---|---|"]
    for package, folder in asked:
        try:
            found = {name: outcome(f"{package}:{name}") for name in list(names(package, folder))}
        except ModuleNotFoundError as error:
            print(f"{package}: the module {error.name} is not installed")
            continue
        for name, reason in found.items():
            if reason:
                print(f"{package}:{name}: {' '.join(reason.split()):.160}", flush=True)
        reasons = [reason for reason in found.values() if reason]
        absent = sum(bool(ABSENT.search(reason)) for reason in reasons)
        ran = len(found) - len(reasons)
        table.append(f"| {package} | {len(found)} | {ran} | {absent} | {len(reasons) - absent} |")
    print("\n".join(table), flush=True)
    os._exit(0)  # what hangs is left behind


if __name__ == "__main__":
    main(sys.argv[1:])

"""Runs tests of a checkout of verl against compat/verl: which pass, which fail, which cannot be imported, and why.

    python tools/verl_tests.py CHECKOUT [WORD ...]

Test files are copied to a folder of their own, so that the checkout's own `verl` is not imported. WORDS choose files
whose path holds one of them. The list is of what plug-ins rely on: formulas, metrics, corrections, the container of a
batch, configs, registries. docs/en/from_verl.md says what cannot pass, and why.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
SECONDS = 600
FILES = (
    "tests/test_base_config_on_cpu.py",
    "tests/test_protocol_on_cpu.py",
    "tests/test_protocol_v2_on_cpu.py",
    "tests/trainer/ppo/test_core_algos_on_cpu.py",
    "tests/trainer/ppo/test_dynamic_policy_losses_on_cpu.py",
    "tests/trainer/ppo/test_loss_aggregation_on_cpu.py",
    "tests/trainer/ppo/test_metric_utils_on_cpu.py",
    "tests/trainer/ppo/test_reinforce_pp_multiturn_on_cpu.py",
    "tests/trainer/ppo/test_rollout_corr.py",
    "tests/trainer/ppo/test_rollout_corr_integration.py",
    "tests/trainer/ppo/test_value_loss_normalization_on_cpu.py",
    "tests/trainer/config/test_algo_config_on_cpu.py",
    "tests/utils/test_groupwise.py",
    "tests/workers/reward_manager/test_registry_on_cpu.py",
)
"""Files of verl's 0.8 and 0.9 lines; a checkout has those of its own."""


def main(arguments: list[str]) -> int:
    if not arguments or not (Path(arguments[0]) / "tests").is_dir():
        print(
            "usage: python tools/verl_tests.py CHECKOUT [WORD ...], a folder with a checkout of verl", file=sys.stderr
        )
        return 2
    checkout, words = Path(arguments[0]).resolve(), arguments[1:]
    chosen = [name for name in FILES if not words or any(word in name for word in words)]
    counts: Counter[str] = Counter()
    for name in (name for name in chosen if (checkout / name).is_file()):
        counts += tried(checkout / name, name)
    print(f"all: {described(counts)}")
    return 0


def tried(file: Path, name: str) -> Counter[str]:
    """Runs one file and prints what came of it: a line for the file, and one for each test that did not pass."""
    outcomes = outcomes_of(file)
    counts = Counter(outcome for _, outcome, _ in outcomes)
    print(f"{name}: {described(counts)}")
    for test, outcome, why in outcomes:
        if outcome in ("failed", "not importable"):
            print(f"  {outcome}: {test}: {why}")
    return counts


def outcomes_of(file: Path) -> list[tuple[str, str, str]]:
    """Returns each test of a file, its outcome, and the reason if it did not pass."""
    with tempfile.TemporaryDirectory(prefix="verl-tests-") as folder:
        copied, report = Path(folder) / file.name, Path(folder) / "report.xml"
        shutil.copyfile(file, copied)
        paths = os.pathsep.join([str(ROOT / "compat"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        command = [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--rootdir={folder}",
                   f"--junitxml={report}", str(copied)]  # fmt: skip
        environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
        try:
            done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=SECONDS)
        except subprocess.TimeoutExpired:
            return [(file.name, "failed", f"took more than {SECONDS} s")]
        if not report.is_file():
            return [(file.name, "failed", (done.stderr or done.stdout).strip()[-200:])]
        return [outcome_of(case) for case in ElementTree.parse(report).iter("testcase")]


def outcome_of(case: ElementTree.Element) -> tuple[str, str, str]:
    test = f"{case.get('classname', '').rpartition('.')[2]}.{case.get('name')}"
    for tag, outcome in (("error", "not importable"), ("failure", "failed"), ("skipped", "skipped")):
        if (found := case.find(tag)) is not None:
            return test, outcome, reason_of(found)
    return test, "passed", ""


def reason_of(found: ElementTree.Element) -> str:
    """Returns the line of an error, of a traceback the last one."""
    lines = [line.removeprefix("E").strip() for line in (found.text or "").splitlines() if line.startswith("E ")]
    return (lines[-1] if found.tag == "error" and lines else (found.get("message") or "").partition("\n")[0])[:200]


def described(counts: Counter[str]) -> str:
    return ", ".join(f"{counts[name]} {name}" for name in ("passed", "failed", "not importable", "skipped"))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

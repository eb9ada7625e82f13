"""The command `paddock doctor`, also called `doctor env`: this machine as a list for people or as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict

from paddock.doctor.environment import MachineReport, look
from paddock.errors import UserError

FLAGS = ("--json", "--network")


def run(arguments: list[str]) -> int:
    words = [argument for argument in arguments if not argument.startswith("-")]
    if words not in ([], ["env"]):
        reason = "there is no such thing to look at"
        raise UserError(reason, key="paddock doctor", value=" ".join(words), fix="paddock doctor env")
    for argument in arguments:
        if argument.startswith("-") and argument not in FLAGS:
            raise UserError("is not a flag", key=argument, fix=f"one of: {', '.join(FLAGS)}")
    report = look(network="--network" in arguments)
    print(json.dumps(asdict(report), indent=2) if "--json" in arguments else text_of(report))
    return 0


def text_of(report: MachineReport) -> str:
    parts = (machine, accelerators, packages, extras, sandbox, hub)
    return "\n".join(line for part in parts for line in part(report))


def machine(report: MachineReport) -> list[str]:
    memory = f"{report.memory_gib:.1f} GiB"
    if report.memory_free_gib is not None:
        memory += f", {report.memory_free_gib:.1f} GiB free"
    if report.memory_limit_gib is not None:
        memory += f", {report.memory_limit_gib:.1f} GiB for this container"
    kernels = "compiled and in the cache" if report.kernels_compiled else "compiled by the first run that needs them"
    return [
        "Machine",
        item("paddock", report.paddock),
        item("Python", report.python),
        item("system", report.system),
        item("CPU", f"{report.processor}, {report.cores} cores"),
        item("memory", memory),
        *(item("disk", f"{free:.1f} GiB free in {folder}") for folder, free in report.disk_free_gib.items()),
        item("C++ compiler", f"{report.compiler}; CPU kernels are {kernels}" if report.compiler
             else "none: CPU steps run by torch's own operations, and take longer", bool(report.compiler)),
        *([] if report.compiler else [fix("apt-get install g++, or set CXX")]),
    ]  # fmt: skip


def accelerators(report: MachineReport) -> list[str]:
    there = report.accelerators
    lines = ["Accelerators"]
    lines += [item(f"{there.kind}:{place}", name) for place, name in enumerate(there.devices)]
    if there.problem:
        lines += [item("problem", there.problem, False), fix(there.fix or "")]
    elif not there.devices:
        lines.append(item("none", "runs use the CPU; `paddock plan` says whether a model fits this machine"))
    return lines


def packages(report: MachineReport) -> list[str]:
    there = report.packages.items()
    return ["Packages", *(item(name, version or "missing", version is not None) for name, version in there)]


def extras(report: MachineReport) -> list[str]:
    lines = ["Extras"]
    for extra in report.extras:
        versions = ", ".join(f"{package} {version}" for package, version in extra.versions.items())
        if extra.whole:
            lines.append(item(extra.name, f"{versions}: {extra.purpose}"))
        else:
            lines.append(item(extra.name, f"missing, for {extra.purpose}; without it: {extra.without}", False))
            lines.append(fix(extra.install))
    return lines


def sandbox(report: MachineReport) -> list[str]:
    box = report.sandbox
    lines = ["Sandbox for programs that a model wrote"]
    if box.works:
        lines.append(item("isolation", f"{box.isolation} works here"))
        if box.guard:
            lines.append(item("memory", f"guarded by {box.guard}"))
    else:
        lines += [item("isolation", f"not possible: {box.reason}", False), fix(box.fix or "")]
    return lines


def hub(report: MachineReport) -> list[str]:
    there = report.hub
    asked = "not asked: --network does" if there.answers is None else "answers" if there.answers else "does not answer"
    said = f" ({there.said})" if there.said else ""
    offline = "; HF_HUB_OFFLINE is set, so that runs do not ask it" if there.offline else ""
    return [
        "Hub and cache",
        item("hub", f"{there.endpoint} {asked}{said}{offline}", there.answers is not False),
        item("cache", f"{report.cache} (XDG_CACHE_HOME moves it)"),
    ]


def item(name: str, text: str, good: bool = True) -> str:
    return f"  {'+' if good else '-'} {name:<14} {text}"


def fix(text: str) -> str:
    return f"      fix: {text}"

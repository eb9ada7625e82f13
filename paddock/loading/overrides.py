"""From command line and YAML to settings: Hydra's own override grammar and flags, and files with dotted keys."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from paddock.config import tree
from paddock.config.paths import expand
from paddock.config.recipes import CONFIG_NAMES
from paddock.errors import UserError

FLAGS = {
    **dict.fromkeys(("--config-path", "-cp", "--config-dir", "-cd"), "path"),
    **dict.fromkeys(("--config-name", "-cn"), "name"),
}
REFUSED_FLAGS = {
    **dict.fromkeys(("--multirun", "-m"), "one command is one run"),
    **dict.fromkeys(("--cfg", "-c", "--resolve"), "use `paddock plan --json`"),
    "--info": "use `paddock plan`",
    "--hydra-help": "use `paddock --help`",
}

MOST_VALUES = 100_000  # in one file; a config has some hundreds
KEY = re.compile(r"[A-Za-z0-9_]+([./@:-][A-Za-z0-9_]+)*")


LINE, PROGRAM = "command line", "Run(...)"
"""Origins of settings that the user typed, rather than wrote into a file."""


@dataclass(frozen=True)
class Setting:
    """A key that the user set, or deleted."""

    key: str
    value: Any
    origin: str  # LINE, PROGRAM, or the file's path
    delete: bool = False
    merge: bool = False  # a mapping that adds to what is there


@dataclass(frozen=True)
class CommandLine:
    settings: list[Setting]
    base: dict[str, Any]  # of the built-in config name
    warnings: list[str] = field(default_factory=list)


def parse(arguments: Sequence[str]) -> CommandLine:
    """Flags and overrides in any order, as Hydra takes them; later settings win, the command line over files."""
    flags, overrides = _split(arguments)
    base, from_files = _named(flags.get("name", "ppo_trainer"), flags.get("path"), "--config-name", [])
    typed, warnings = _parse_overrides(overrides)
    return CommandLine([*from_files, *typed], base, warnings)


def _split(arguments: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    flags: dict[str, str] = {}
    overrides: list[str] = []
    rest = iter(arguments)
    for argument in rest:
        name, equals, value = argument.partition("=")
        if name in FLAGS:
            flags[FLAGS[name]] = value if equals else next(rest, "")
            if not flags[FLAGS[name]]:
                raise UserError("needs a value", key=name, fix=f"{name}=...")
        elif name in REFUSED_FLAGS:
            raise UserError("is not taken here", key=name, fix=REFUSED_FLAGS[name])
        elif argument.startswith("-"):
            raise UserError("is not a flag", key=argument, fix="overrides are written key=value; see `paddock --help`")
        else:
            overrides.append(argument)
    return flags, overrides


def _parse_overrides(overrides: Sequence[str]) -> tuple[list[Setting], list[str]]:
    """Returns settings, and warnings for what Hydra would refuse: an argument of blanks, which a backslash before a
    blank leaves at the end of a script's line, and the value of a key of text that its grammar cannot read."""
    parser = OverridesParser.create()
    parsed, warnings = list[Setting](), list[str]()
    for text in overrides:
        if not text.strip() and text:
            blank = "an argument of blanks is left out: does a line of the script end with a backslash and blanks?"
            warnings.append(blank)
            continue
        if "=" not in text and not text.startswith("~"):
            raise UserError("is neither a flag nor an override", key=repr(text), fix="write key=value, or ~key")
        try:
            override = parser.parse_override(text)
        except (HydraException, OmegaConfBaseException, RecursionError, ValueError) as error:
            if plain := _plain_text(text):
                parsed.append(plain)
                warnings.append(f"{plain.key}={plain.value} is taken as a text: Hydra's grammar cannot read it")
                continue
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise UserError(f"cannot be read: {reason}", key=f"{text!r:.200}", fix=_remedy(text)) from None
        if override.is_sweep_override():
            fix = "start one run per value, or write a list: [a,b]"
            raise UserError("is a sweep, and one command is one run", key=text, fix=fix)
        parsed.append(_setting(override))
    return parsed, warnings


def _plain_text(text: str) -> Setting | None:
    """Returns the setting of a key that takes texts alone, as it is typed; None for other keys, and after an open
    quote."""
    key, equals, value = text.lstrip("+").partition("=")
    leaf = tree.leaf_of(key) if equals and not {"'", '"'} & {*value} and "~/" not in value else None
    return Setting(key, value, LINE) if leaf is not None and leaf.type in (str, str | None) else None


def _remedy(text: str) -> str:
    """Returns the fix for an override that Hydra's grammar refuses."""
    key, _, value = text.lstrip("+~").partition("=")
    if not KEY.fullmatch(key):
        return "a key is words of letters, digits and _, joined by dots: data.train_files=..."
    return "write $HOME for ~" if "~/" in value else "quote values with special characters: 'key=\"value\"'"


def _setting(override: Override) -> Setting:
    if override.package is not None:
        fix = "leave it out, and set the keys that you want different"
        raise UserError("chooses a config group, and there is one schema here", key=override.input_line, fix=fix)
    deletes = override.type is OverrideType.DEL
    value = None if deletes and override._value is None else override.value()
    return Setting(override.key_or_group.replace("/", "."), value, LINE, deletes, merge=isinstance(value, dict))


def _named(name: str, folder: str | None, key: str, trail: list[Path]) -> tuple[dict[str, Any], list[Setting]]:
    """Reads a config by its name. A file in the folder wins over a built-in name: launch scripts name folders of the
    system they come from. `trail`: the files that name this one, which it may not be again."""
    stem = name.removesuffix(".yaml").removesuffix(".yml")
    for suffix in (".yaml", ".yml"):
        path = Path(expand(folder or ".")) / f"{stem}{suffix}"
        wins = folder is not None or stem not in CONFIG_NAMES
        if wins and path.is_file() and path.resolve() not in trail:
            return _read(path, trail)
    if stem in CONFIG_NAMES:
        return CONFIG_NAMES[stem], []
    fix = f"give --config-path, or use a built-in: {', '.join(CONFIG_NAMES)}"
    raise UserError(f"no {stem}.yaml in {folder or 'the current folder'}", key=key, value=name, fix=fix)


def _read(path: Path, trail: list[Path]) -> tuple[dict[str, Any], list[Setting]]:
    """Reads a YAML file and those that its `defaults` list names, in order; `_self_` is the file itself."""
    document, key = read_yaml(path), f"{path}: defaults"
    defaults = document.pop("defaults", None) or ["_self_"]
    document.pop("hydra", None)
    if not isinstance(defaults, list):
        raise UserError("is not a list", key=key, value=defaults, fix="defaults: [ppo_trainer, _self_]")
    base: dict[str, Any] = {}
    settings: list[Setting] = []
    for entry in defaults if "_self_" in defaults else [*defaults, "_self_"]:
        if entry == "_self_":
            settings += [Setting(key, value, str(path)) for key, value in flatten(document, "")]
        elif isinstance(entry, str):
            sub_base, sub_settings = _named(entry, str(path.parent), key, [*trail, path.resolve()])
            base, settings = base | sub_base, settings + sub_settings
        else:
            fix = "write its keys into the file"
            raise UserError("config groups are not used here", key=key, value=entry, fix=fix)
    return base, settings


def read_yaml(path: Path) -> dict[str, Any]:
    """Returns a YAML file of keys as OmegaConf reads it: 1e-6 is a number, and an interpolation is a text."""
    try:
        text = path.read_text(encoding="utf-8")
        written = yaml.compose(text, Loader=yaml.SafeLoader)
        if written is None:
            return {}
        if not isinstance(written, yaml.MappingNode):
            raise UserError("is not a mapping of keys", key=str(path), fix="write `section:` and keys below it")
        if _values(written, {}) > MOST_VALUES:
            reason = f"its aliases stand for more than {MOST_VALUES:,} values"
            raise UserError(reason, key=str(path), fix="write the values out, without & and *")
        document = cast(dict[Any, Any], OmegaConf.to_container(OmegaConf.create(text)))
    except (OSError, ValueError, yaml.YAMLError, OmegaConfBaseException, RecursionError) as error:
        raise UserError(f"cannot be read: {error}", key=str(path), fix="write valid YAML in UTF-8") from None
    return {str(name): value for name, value in document.items()}


def _values(node: yaml.Node, counted: dict[int, float]) -> float:
    """Returns how many values a YAML node stands for once aliases are written out; infinitely many if it holds
    itself."""
    if id(node) not in counted:
        counted[id(node)] = math.inf
        inner = node.value if isinstance(node, yaml.SequenceNode) else []
        if isinstance(node, yaml.MappingNode):
            inner = [part for pair in node.value for part in pair]
        counted[id(node)] = 1 + sum(_values(part, counted) for part in inner)
    return counted[id(node)]


def flatten(node: dict[Any, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    """Yields dotted keys and values of a nested mapping."""
    for name, value in node.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and value:
            yield from flatten(value, f"{key}.")
        else:
            yield key, value

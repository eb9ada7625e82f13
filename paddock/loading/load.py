"""Arguments -> a complete Config: schema, recipe, files, command line, machine. Every key remembers its origin."""

from __future__ import annotations

import pickle
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial, reduce
from typing import Any, cast, get_args

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from paddock.config import recipes, rollout_correction, tree
from paddock.config.loggers import LOGGERS
from paddock.config.paths import expanded
from paddock.config.plugins import import_plugin
from paddock.config.rewards import PATH, WEIGHTS, address_of, texts_of
from paddock.config.rollout_engines import ENGINES
from paddock.config.schema import Config
from paddock.errors import UserError, together
from paddock.facts.machine import Machine, this_machine
from paddock.loading import budgets, foreign, own_data, resolve, rules, trl
from paddock.loading.overrides import LINE, PROGRAM, Setting, parse

NO_SUCH_KEY = "no such key"
FOLLOWS = re.compile(r"\$\{([\w.]+)\}")


@dataclass
class Loaded:
    """A run as it will be, and how it came to be so."""

    config: Config
    origins: dict[str, str]  # key -> where its value came from; a key that is absent has the schema's default
    warnings: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self.config)


def load(
    arguments: Sequence[str] = (),
    machine: Machine | None = None,
    values: Mapping[str, Any] | None = None,
    here: bool = True,
    gpu: str | None = None,
    trains: bool = True,
    chooses: bool = False,
) -> Loaded:
    """Everything a run is made of, checked. Raises UserError for what the user can mend; imports no torch.

    `values`: keys and their values from a Python program, which win over the arguments. `here`: False if files that
    the config names may be on another machine, as those of a planned script. `gpu`: the name of the device to plan
    for, as `facts.machine` has it; it stands for this machine's. `trains`: False if weights are only read, so that
    nothing is to be decided or checked for updates. `chooses`: True for a run of Paddock's own, whose model and data
    decide what is left unset; a launch script written for verl counts on verl's defaults once it names something.
    """
    machine = machine or this_machine()
    if gpu is not None:
        machine = machine.with_gpu(gpu)
    line = parse(arguments)
    settings, warnings, errors = known([*line.settings, *given(values or {})], planned=not here)
    if errors:
        raise together(errors)
    settings, warnings = functions_apart(settings), [*line.warnings, *warnings]
    chosen = {setting.key: setting.value for setting in settings}
    applies = own_data.applies(chosen, machine if chooses else None)
    own = own_data.choices(chosen, machine) if applies else []
    embedded = recipes.is_embedded(chosen, chooses)
    config, origins = _built(_layers(line.base, chosen, own, embedded), settings)
    if own and config.trainer.resume_mode != "disable":
        again = own_data.as_the_run_has_them(own, config.trainer.default_local_dir, chosen)
        if again != own:
            own = again
            config, origins = _built(_layers(line.base, chosen, own, embedded), settings)
    origins |= {choice.key: f"{own_data.ORIGIN}: {choice.why}" for choice in own}
    warnings = [*(str(choice) for choice in own if choice.said), *warnings]
    rules.check_limits(config)
    warnings += resolve.resolve(config, origins, machine, anywhere=chooses and embedded)
    warnings += [str(choice) for choice in budgets.decide(config, origins, machine, gpu, trains)]
    warnings += [*rules.check(config, origins, here, trains), *foreign.differences(partial(tree.get, config), origins)]
    return Loaded(config, origins, warnings)


def _built(layers: list[tuple[str, dict[str, Any]]], settings: list[Setting]) -> tuple[Config, dict[str, str]]:
    """Returns the config of these layers and settings, the strongest last, and where each value came from."""
    defaults, following = _schema()
    tree_of_keys = pickle.loads(defaults)
    origins: dict[str, str] = {}
    for setting in [*(Setting(key, v, source) for source, values in layers for key, v in values.items()), *settings]:
        _assign(tree_of_keys, setting, origins)
    _follow(tree_of_keys, following, origins)
    config = _to_object(tree_of_keys)
    _expand_paths(config)
    return config, origins


def given(values: Mapping[str, Any]) -> list[Setting]:
    """Returns the settings of a Python program."""
    plain = {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}
    return [Setting(key, value, PROGRAM) for key, value in plain.items()]


PLUGIN = "actor_rollout_ref.model.external_lib"


@cache
def _schema() -> tuple[bytes, dict[str, str]]:
    """Returns the schema as OmegaConf holds it, with a value in place of each interpolation, and the interpolations.

    The tree is pickled: copying it node by node and parsing interpolations would take most of the time of `load`.
    """
    node = OmegaConf.structured(Config)
    written: Any = OmegaConf.to_container(node, resolve=False)
    values = {key: reduce(lambda inner, part: inner[part], key.split("."), written) for key in tree.leaves()}
    following = {key: value for key, value in values.items() if isinstance(value, str) and FOLLOWS.search(value)}
    for key in following:
        if not tree.leaves()[key].open:  # a key that is added to a mapping is added to the one that it follows
            OmegaConf.update(node, key, OmegaConf.select(node, key))
    return pickle.dumps(node), following


def known(settings: list[Setting], planned: bool = False) -> tuple[list[Setting], list[str], list[UserError]]:
    """Returns the settings under the schema's names, warnings, and an error for each key that cannot be taken."""
    kept, warnings, errors = list[Setting](), list[str](), list[UserError]()
    leaves = [leaf for setting in settings for leaf in _leaves_of(setting)]
    every = {leaf.key: leaf.value for leaf in leaves}
    for setting in leaves:
        try:
            translated, warning = foreign.translate(setting.key, setting.value, every, planned)
            if unknown := [key for key, _ in translated if tree.leaf_of(key) is None]:
                raise _unknown(unknown[0], setting)
        except UserError as error:
            errors.append(error)
            continue
        if warning:
            warnings.append(warning)
        for key, value in translated:
            leaf = tree.leaf_of(key)
            ours = key == setting.key and setting.origin in (LINE, PROGRAM)
            if value is None and not ours and not (leaf and (leaf.optional or leaf.open)):
                continue  # a key of another system, or of a file, that is not set
            kept.append(Setting(key, value, setting.origin, setting.delete, setting.merge))
    return kept, list(dict.fromkeys(warnings)), list({str(error): error for error in errors}.values())


def _leaves_of(setting: Setting) -> list[Setting]:
    """A mapping assigned to a section, of ours or of other systems, is one setting for each key in it."""
    ours = setting.key in tree.sections() or tree.leaf_of(setting.key) is not None
    section = setting.key in tree.sections() or (not ours and foreign.is_section(setting.key))
    if not section or not isinstance(setting.value, dict):
        return [setting]
    return [
        leaf
        for name, value in setting.value.items()
        for leaf in _leaves_of(Setting(f"{setting.key}.{name}", value, setting.origin, merge=isinstance(value, dict)))
    ]


def _unknown(key: str, setting: Setting) -> UserError:
    if key in tree.sections():
        inside = next(leaf for leaf in tree.leaves() if leaf.startswith(f"{key}."))
        return UserError("is a section, not a key", key=key, value=setting.value, fix=f"set a key in it: {inside}=...")
    if theirs := trl.key_of(key):
        fix = f"TRL's {key.rpartition('.')[2]} is {theirs} here; docs/en/from_trl.md says which values it takes"
        return UserError(NO_SUCH_KEY, key=key, value=setting.value, fix=fix)
    nearest = tree.meant(key, frozenset(k for k in foreign.rules() if "*" not in k))
    fix = f"did you mean {' or '.join(nearest)}?" if nearest else "`paddock plan` lists the keys in use"
    reason = NO_SUCH_KEY if setting.origin in (LINE, PROGRAM) else f"{NO_SUCH_KEY} (in {setting.origin})"
    return UserError(reason, key=key, value=setting.value, fix=fix)


def _layers(
    base: dict[str, Any], chosen: dict[str, Any], own: Sequence[own_data.Choice], embedded: bool
) -> list[tuple[str, dict[str, Any]]]:
    """Returns the settings between the schema's defaults and the user's, weakest first; `own` are choices for data."""
    ours = {choice.key: choice.value for choice in own}
    key = "algorithm.adv_estimator"
    estimator = str(chosen.get(key, ours.get(key, tree.default_of(key))))
    _import_declaring(chosen, estimator)
    recipe = recipes.recipe_of(estimator)
    if recipe is None:
        names = (*recipes.ESTIMATORS, *recipes.ALIASES)
        raise rules.unknown("advantage estimator", key, estimator, names)
    layers = [(f"recipe {estimator}", recipe.values), ("--config-name", base)]
    if embedded:
        values = recipes.embedded(chosen.get("environment"))
        if chosen.get(own_data.FILES) not in (None, values[own_data.FILES]):
            values = {key: value for key, value in values.items() if key != "data.val_files"}
        layers.append(("embedded default", recipes.left_to_user(values, chosen)))
    elif own:
        layers.append((own_data.ORIGIN, ours))
    else:
        layers.append(("guide", {key: v for key, v in recipes.GUIDE.items() if key != "data.val_files"}))
        if chosen.get("environment") and chosen.get("data.train_files") is None:
            layers.append(("the environment asks", recipes.EPISODES))
    if preset := rollout_correction.preset_settings(chosen):
        layers.append((f"preset {preset[0]}", preset[1]))
    return layers


def _import_declaring(chosen: dict[str, Any], estimator: str) -> None:
    """Imports the user's plug-in if a setting names an estimator, engine or logger that no catalogue has: the plug-in
    declares it. Otherwise the plug-in is imported with torch, later."""
    loggers, engine = chosen.get("trainer.logger"), chosen.get("actor_rollout_ref.rollout.name")
    unknown = (
        recipes.recipe_of(estimator) is None
        or (engine is not None and str(engine) not in ENGINES)
        or any(str(name) not in LOGGERS for name in (loggers if isinstance(loggers, list) else [loggers]) if name)
    )
    if unknown and (plugin := chosen.get(PLUGIN)):
        import_plugin(plugin, PLUGIN)


def _assign(node: DictConfig, setting: Setting, origins: dict[str, str]) -> None:
    leaf = tree.leaf_of(setting.key)
    assert leaf is not None, setting.key
    value = None if setting.delete else setting.value
    if setting.delete and setting.value is not None and setting.value != OmegaConf.select(node, setting.key):
        raise UserError("does not have that value", key=f"~{setting.key}", value=setting.value, fix=f"~{setting.key}")
    if value is None and leaf.open and setting.key == leaf.key:
        value = {}
    if value is None and not leaf.optional and not leaf.open:
        fix = f"{setting.key}: {leaf.metadata['meaning']}"
        raise UserError("cannot be null", key=setting.key, value="null", fix=fix)
    kinds = get_args(leaf.type)
    if type(value) is int and float in kinds and int not in kinds:  # of a union OmegaConf takes no whole number for it
        value = float(value)
    if leaf.type is bool and isinstance(value, int) and value not in (0, 1):  # OmegaConf would take it for True
        raise _wrong_type(leaf, setting, ValueError("neither True nor False"))
    try:
        if setting.delete and leaf.key != setting.key:
            parent, _, name = setting.key.rpartition(".")
            OmegaConf.select(node, parent).pop(name, None)
        else:
            OmegaConf.update(node, setting.key, value, merge=setting.merge, force_add=leaf.open)
    except (OmegaConfBaseException, AttributeError, TypeError, ValueError, OverflowError) as error:
        raise _wrong_type(leaf, setting, error) from None
    origins[leaf.key] = setting.origin


def _wrong_type(leaf: tree.Leaf, setting: Setting, error: Exception) -> UserError:
    wanted = re.sub(r"\s*\|\s*None", " or null", str(getattr(leaf.type, "__name__", leaf.type)))
    if leaf.optional and leaf.type is not Any and "null" not in wanted:
        wanted = str(leaf.type).replace(" | None", " or null")
    reason = f"must be {wanted}: {str(error).splitlines()[0]}"
    choices = leaf.metadata.get("choices")
    fix = f"one of {', '.join(map(str, choices))}" if choices else f"{leaf.key}: {leaf.metadata['meaning']}"
    return UserError(reason, key=setting.key, value=setting.value, fix=fix)


def _follow(node: DictConfig, following: dict[str, str], origins: dict[str, str]) -> None:
    """Has unset keys follow those that the schema names, and names these. Where they were not set either, the default
    is there already."""
    given = set(origins)

    def moved(key: str) -> bool:
        return key in given or any(map(moved, FOLLOWS.findall(following.get(key, ""))))

    for key in following.keys() - given:
        if moved(key):
            OmegaConf.update(node, key, following[key], merge=False)
        origins[key] = f"follows {FOLLOWS.findall(following[key])[0]}"


def _to_object(node: DictConfig) -> Config:
    try:
        return cast(Config, OmegaConf.to_object(node))
    except (OmegaConfBaseException, RecursionError, TypeError, ValueError) as error:
        reason = (str(error).splitlines() or ["refers to itself"])[0]
        where = next((key for key in tree.leaves() if not _resolves(node, key)), None)
        fix = "${a.b} takes the value of key a.b, ${oc.env:NAME} an environment variable"
        raise UserError(reason, key=where, fix=fix) from None


def _resolves(node: DictConfig, key: str) -> bool:
    try:
        OmegaConf.select(node, key)
        return True
    except (OmegaConfBaseException, RecursionError, TypeError, ValueError):
        return False


def _expand_paths(config: Config) -> None:
    for key, leaf in tree.leaves().items():
        if leaf.metadata.get("path"):
            value = tree.get(config, key)
            if isinstance(value, str):
                tree.put(config, key, expanded(key, value))
            elif isinstance(value, list):
                tree.put(config, key, [expanded(key, item) if isinstance(item, str) else item for item in value])


def functions_apart(settings: list[Setting]) -> list[Setting]:
    """Returns the settings with addresses of functions in `reward`, and their weights, under the keys of functions:
    `reward=[FILE.py:function, exact_match]`."""
    last = {setting.key: setting for setting in settings}
    named = last.get("reward")
    items = texts_of("reward", named.value) if named and isinstance(named.value, str | list) else []
    functions = {index: address for index, item in enumerate(items) if (address := address_of(item))}
    if not named or not functions:
        return settings
    if (other := last.get(PATH)) and other.value:
        fix = f"name all functions in one of them: reward=[{','.join(items)},...]"
        raise UserError(f"names a function, and {PATH} names others", key="reward", value=named.value, fix=fix)
    parted: dict[str, Any] = {"reward": [item for index, item in enumerate(items) if index not in functions] or None,
                              PATH: list(functions.values())}  # fmt: skip
    weights = last["reward_weights"].value if "reward_weights" in last else None
    if isinstance(weights, list) and len(weights) == len(items):
        parted["reward_weights"] = [one for index, one in enumerate(weights) if index not in functions] or None
        parted[WEIGHTS] = [weights[index] for index in functions]
    kept = [setting for setting in settings if setting.key not in parted]
    return [*kept, *(replace(named, key=key, value=value) for key, value in parted.items())]

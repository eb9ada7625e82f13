"""Rules on teachers and on what they teach."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from paddock.config.distillation import TEACHERS, TOPK, teachers_of
from paddock.config.schema import Config
from paddock.config.topology import learns_from_rewards
from paddock.facts.models import shape_of
from paddock.loading.rules.form import Breach, rule

_LOSS = "distillation.distillation_loss"
FIELDS = ("model_path", "key")
OF_SERVERS = ("inference", "num_replicas")
"""Fields of a teacher that has a server, as whole config files of verl's hold them."""
NO_TEACHER_SERVER = (
    "a teacher has no server: it runs as the reference does, on the devices of trainer.* and by the keys of "
    "actor_rollout_ref.ref"
)


@rule
def teachers_are_named(config: Config) -> Iterator[Breach]:
    distillation = config.distillation
    for name, entry in distillation.teacher_models.items() if distillation.enabled else ():
        key = f"{TEACHERS}.{name}"
        if not isinstance(entry, Mapping):
            yield key, "is a section, not a key", f"{key}.model_path={entry}"
            continue
        for field in [field for field in entry if field not in (*FIELDS, *OF_SERVERS)]:
            yield f"{key}.{field}", "no such key", f"a teacher has {' and '.join(FIELDS)}"
    teachers = teachers_of(distillation)
    if distillation.enabled and not teachers:
        key = f"{TEACHERS}.teacher_model.model_path"
        reason = "distillation needs a teacher, and no model is named"
        yield key, reason, f"{key}=MODEL, of the student's tokenizer", None
    by_key: dict[str, str] = {}
    for teacher in teachers if len(teachers) > 1 else ():
        key = f"{TEACHERS}.{teacher.name}.key"
        if teacher.key is None:
            reason = f"there are {len(teachers)} teachers, and no row would go to this one"
            yield key, reason, f"{key}=VALUE, as rows have it in {distillation.teacher_key}"
        elif teacher.key in by_key:
            yield key, f"teacher {by_key[teacher.key]} has the same key", "one teacher for each value"
        else:
            by_key[teacher.key] = teacher.name


@rule
def the_teacher_moves_the_loss(config: Config) -> Iterator[Breach]:
    """The gradient of k1 = log pi - log nu has no nu in it."""
    loss = config.distillation.distillation_loss
    if config.distillation.enabled and loss.loss_mode in ("k1", "kl") and not loss.use_policy_gradient:
        fix = f"{_LOSS}.use_policy_gradient=True; or {_LOSS}.loss_mode=k3, or forward_kl_topk"
        yield f"{_LOSS}.loss_mode", "as a loss its gradient does not depend on the teacher", fix


@rule
def distillation_trains_the_actor_alone(config: Config) -> Iterator[Breach]:
    if config.critic.enable and not learns_from_rewards(config):
        reason = "teachers alone train the actor, and nothing reads values"
        yield "critic.enable", reason, f"leave it out, or {_LOSS}.use_task_rewards=True"


@rule
def teachers_know_the_tokens(config: Config) -> Iterator[Breach]:
    """Every token that the student may draw has a log-prob by its teacher, and a top-k has k tokens."""
    loss, student = config.distillation.distillation_loss, shape_of(config.actor_rollout_ref.model.path or "")
    if student is None:
        return
    for teacher in teachers_of(config.distillation):
        shape = shape_of(teacher.path)
        if shape is not None and shape.vocab < student.vocab:
            reason = f"has a vocabulary of {shape.vocab} tokens, and the student draws from {student.vocab}"
            yield teacher.setting, reason, "a teacher of the student's family: token ids must mean the same to both"
    if config.distillation.enabled and loss.loss_mode == TOPK and loss.topk > student.vocab:
        yield f"{_LOSS}.topk", f"the vocabulary has {student.vocab} tokens", f"{_LOSS}.topk=32"


def served_teachers(config: Config) -> Iterator[str]:
    """Yields a line for each field of a teacher that only a server would read."""
    for name, entry in config.distillation.teacher_models.items() if config.distillation.enabled else ():
        for field in set(entry) & set(OF_SERVERS):
            yield f"{TEACHERS}.{name}.{field} is ignored: {NO_TEACHER_SERVER}"

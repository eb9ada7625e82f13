"""Rules on teachers and on what they teach."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from paddock.config.distillation import TEACHERS, TOPK, teachers_of
from paddock.config.schema import Config
from paddock.config.topology import learns_from_rewards
from paddock.errors import UserError
from paddock.facts.models import shape_of
from paddock.loading.rules.form import rule

_LOSS = "distillation.distillation_loss"
FIELDS = ("model_path", "key")
OF_SERVERS = ("inference", "num_replicas")
"""Fields of a teacher that has a server, as whole config files of verl's hold them."""
NO_TEACHER_SERVER = (
    "a teacher has no server: it runs as the reference does, on the devices of trainer.* and by the keys of "
    "actor_rollout_ref.ref"
)


@rule
def teachers_are_named(config: Config) -> None:
    distillation = config.distillation
    if not distillation.enabled:
        return
    for name, entry in distillation.teacher_models.items():
        if not isinstance(entry, Mapping):
            fix = f"{TEACHERS}.{name}.model_path={entry}"
            raise UserError("is a section, not a key", key=f"{TEACHERS}.{name}", value=entry, fix=fix)
        for field in entry:
            if field not in (*FIELDS, *OF_SERVERS):
                key = f"{TEACHERS}.{name}.{field}"
                raise UserError("no such key", key=key, value=entry[field], fix=f"a teacher has {' and '.join(FIELDS)}")
    teachers = teachers_of(distillation)
    if not teachers:
        raise UserError(
            "distillation needs a teacher, and no model is named",
            key=f"{TEACHERS}.teacher_model.model_path",
            fix=f"{TEACHERS}.teacher_model.model_path=MODEL, of the student's tokenizer",
        )
    by_key: dict[str, str] = {}
    for teacher in teachers if len(teachers) > 1 else ():
        key = f"{TEACHERS}.{teacher.name}.key"
        if teacher.key is None:
            reason = f"there are {len(teachers)} teachers, and no row would go to this one"
            raise UserError(reason, key=key, fix=f"{key}=VALUE, as rows have it in {distillation.teacher_key}")
        if teacher.key in by_key:
            reason = f"teacher {by_key[teacher.key]} has the same key"
            raise UserError(reason, key=key, value=teacher.key, fix="one teacher for each value")
        by_key[teacher.key] = teacher.name


@rule
def the_teacher_moves_the_loss(config: Config) -> None:
    """The gradient of k1 = log pi - log nu has no nu in it."""
    loss = config.distillation.distillation_loss
    if config.distillation.enabled and loss.loss_mode in ("k1", "kl") and not loss.use_policy_gradient:
        raise UserError(
            "as a loss its gradient does not depend on the teacher",
            key=f"{_LOSS}.loss_mode",
            value=loss.loss_mode,
            fix=f"{_LOSS}.use_policy_gradient=True; or {_LOSS}.loss_mode=k3, or forward_kl_topk",
        )


@rule
def distillation_trains_the_actor_alone(config: Config) -> None:
    if config.critic.enable and not learns_from_rewards(config):
        raise UserError(
            "teachers alone train the actor, and nothing reads values",
            key="critic.enable",
            value=True,
            fix=f"leave it out, or {_LOSS}.use_task_rewards=True",
        )


@rule
def teachers_know_the_tokens(config: Config) -> None:
    """Every token that the student may draw has a log-prob by its teacher, and a top-k has k tokens."""
    loss, student = config.distillation.distillation_loss, shape_of(config.actor_rollout_ref.model.path or "")
    if student is None:
        return
    for teacher in teachers_of(config.distillation):
        shape = shape_of(teacher.path)
        if shape is not None and shape.vocab < student.vocab:
            raise UserError(
                f"has a vocabulary of {shape.vocab} tokens, and the student draws from {student.vocab}",
                key=teacher.setting,
                value=teacher.path,
                fix="a teacher of the student's family: token ids must mean the same to both",
            )
    if config.distillation.enabled and loss.loss_mode == TOPK and loss.topk > student.vocab:
        reason = f"the vocabulary has {student.vocab} tokens"
        raise UserError(reason, key=f"{_LOSS}.topk", value=loss.topk, fix=f"{_LOSS}.topk=32")


def served_teachers(config: Config) -> Iterator[str]:
    """Yields a line for each field of a teacher that only a server would read."""
    for name, entry in config.distillation.teacher_models.items() if config.distillation.enabled else ():
        for field in set(entry) & set(OF_SERVERS):
            yield f"{TEACHERS}.{name}.{field} is ignored: {NO_TEACHER_SERVER}"

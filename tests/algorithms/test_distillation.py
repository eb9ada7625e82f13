"""Distillation losses: values worked by hand, a slow loop in float64, and splits and padding that change nothing."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from paddock.algorithms.distillation import Taught, distillation_terms, divergence, forward_kl
from paddock.algorithms.losses import LossInputs
from paddock.config.distillation import TOPK, DistillationLossConfig
from paddock.config.roles import AGGREGATIONS, ActorConfig
from paddock.core.masked import Denominators

B, R, V, K = 3, 5, 11, 4
LN2 = math.log(2)


def logs(*shares: float) -> Tensor:
    return torch.tensor(shares, dtype=torch.float64).log()


def at_one_token(mode: str, student: float, teacher: float, **keys: Any) -> float:
    taught = Taught(log_probs=logs(teacher)[None])
    config = DistillationLossConfig(loss_mode=mode, **keys)
    inputs = LossInputs(logs(student)[None], logs(student)[None], torch.zeros(1, 1), torch.ones(1, 1))
    return distillation_terms(inputs, taught, config, ActorConfig(), Denominators(1, 1, 1))[0].item()


@pytest.mark.parametrize(
    ("mode", "expected"),
    [("k1+", LN2), ("abs", LN2), ("mse", LN2**2 / 2), ("k2", LN2**2 / 2), ("k3", LN2 - 0.5), ("low_var_kl", LN2 - 0.5)],
)
def test_a_student_of_one_half_against_a_teacher_of_one_quarter(mode, expected):
    """d = ln 2, exp(-d) = 1/2."""
    assert at_one_token(mode, 1 / 2, 1 / 4) == pytest.approx(expected, abs=1e-12)


def test_as_a_reward_the_drawn_token_is_paid_what_the_teacher_finds_it_likelier():
    """A = -k1 = ln(1/4) - ln(1/2) = -ln 2 and r = 1, so that the loss -r A is ln 2; clamped at 1/2 it is 1/2."""
    assert at_one_token("k1", 1 / 2, 1 / 4, use_policy_gradient=True) == pytest.approx(LN2, abs=1e-12)
    clamped = at_one_token("k1", 1 / 2, 1 / 4, use_policy_gradient=True, loss_max_clamp=0.5)
    assert clamped == pytest.approx(0.5, abs=1e-12)
    assert at_one_token("k1", 1 / 4, 1 / 2, use_policy_gradient=True, loss_max_clamp=0.5) == pytest.approx(-0.5)


def test_forward_kl_over_two_tokens_by_hand():
    """0.5 ln(0.5 / 0.25) + 0.3 ln(0.3 / 0.6) = 0.2 ln 2; with a floor at ln 0.01 a forgotten token costs 0.5 ln 50."""
    assert float(forward_kl(logs(0.25, 0.6), logs(0.5, 0.3))) == pytest.approx(0.2 * LN2, abs=1e-12)
    floor = math.log(0.01)
    assert float(forward_kl(logs(1e-9), logs(0.5), floor)) == pytest.approx(0.5 * math.log(50), abs=1e-12)


def test_a_student_with_more_mass_on_the_teachers_tokens_than_the_teacher_learns_nothing():
    """0.3 ln(0.3 / 0.6) + 0.2 ln(0.2 / 0.3) < 0: only the tokens left out can make the whole divergence positive."""
    student = logs(0.6, 0.3)[None, None].requires_grad_()
    taught = Taught(topk_log_probs=logs(0.3, 0.2)[None, None], choice_log_probs=student, kth_log_probs=logs(0.3)[None])
    found, _ = divergence(logs(0.6)[None], taught, torch.ones(1, 1), DistillationLossConfig(loss_mode=TOPK))
    assert found.item() == 0
    assert float(torch.autograd.grad(found.sum(), student)[0].abs().sum()) == 0


def test_overlap_counts_the_teachers_tokens_among_the_students_likeliest():
    """The student's second likeliest token has 0.3, so of the teacher's tokens with 0.6 and 0.1 one is shared."""
    taught = Taught(topk_log_probs=logs(0.5, 0.4)[None, None], choice_log_probs=logs(0.6, 0.1)[None, None],
                    kth_log_probs=logs(0.3)[None])  # fmt: skip
    _, found = divergence(logs(0.6)[None], taught, torch.ones(1, 1), DistillationLossConfig(loss_mode=TOPK))
    assert float(found["distillation/overlap_ratio"]) == 0.5
    assert float(found["distillation/student_mass"]) == pytest.approx(0.7)
    assert float(found["distillation/teacher_mass"]) == pytest.approx(0.9)
    assert float(found["distillation/overlap_token_advantage"]) == pytest.approx(0.5 * math.log(0.6 / 0.5))


class Case:
    """Logits of a student and a teacher over a small vocabulary, and tokens that the student drew."""

    def __init__(self, seed: int = 0, rows: int = B):
        generator = torch.Generator().manual_seed(seed)

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        self.logits, self.teacher = (2 * draw(rows, R, V)).requires_grad_(), 2 * draw(rows, R, V)
        self.tokens = torch.randint(V, (rows, R), generator=generator)
        self.mask = (torch.rand(rows, R, generator=generator) < 0.7).long()  # holes: what an environment wrote
        self.mask[:, 0] = 1
        self.old = draw(rows, R) * 0.3
        self.weights = draw(rows, R).exp()

    def inputs(self) -> tuple[LossInputs, Taught]:
        student, teacher = torch.log_softmax(self.logits, -1), torch.log_softmax(self.teacher, -1)
        drawn = self.tokens.unsqueeze(-1)
        log_probs, best = student.gather(-1, drawn).squeeze(-1), teacher.topk(K)
        taught = Taught(teacher.gather(-1, drawn).squeeze(-1), best.values, student.gather(-1, best.indices),
                        student.detach().topk(K).values[..., -1])  # fmt: skip
        old = log_probs.detach() + self.old
        return LossInputs(log_probs, old, torch.zeros_like(old), self.mask, self.weights), taught


def slow(case: Case, config: DistillationLossConfig, mode: str) -> Tensor:
    """The loss of a mini-batch, token by token, by the whole softmax of each."""
    rows = []
    for i in range(len(case.mask)):
        row = []
        for t in range(R):
            if not case.mask[i, t]:
                continue
            student = case.logits[i, t] - case.logits[i, t].exp().sum().log()
            teacher = case.teacher[i, t] - case.teacher[i, t].exp().sum().log()
            y = int(case.tokens[i, t])
            d = student[y] - teacher[y]
            if config.loss_mode == TOPK:
                value = torch.zeros((), dtype=torch.float64)
                for j in sorted(range(V), key=lambda v: -teacher[v].item())[:K]:
                    p, q = teacher[j], student[j]
                    if config.log_prob_min_clamp is not None:
                        p, q = p.clamp(min=config.log_prob_min_clamp), q.clamp(min=config.log_prob_min_clamp)
                    value = value + p.exp() * (p - q)
                value = value if value.item() > 0 else value * 0
            else:
                k3 = (torch.exp(-d) + d - 1).clamp(max=10)  # kl.py bounds it
                value = {"k1": d, "k3": k3, "k2": d * d / 2, "abs": d.abs()}[config.loss_mode]
            if config.loss_max_clamp is not None and abs(value.item()) > config.loss_max_clamp:
                value = value * 0 + math.copysign(config.loss_max_clamp, value.item())
            if config.use_policy_gradient:
                reward, z = -value.item(), student[y] - (student[y].detach() + case.old[i, t])
                ratio = z.exp()
                loss = max(-reward * ratio, -reward * ratio.clamp(1 - config.clip_ratio, 1 + config.clip_ratio))
                if reward < 0 and loss.item() > -reward * 3.0:
                    loss = loss * 0 - reward * 3.0
                value = loss * case.weights[i, t]
            row.append(value)
        rows.append(row)
    tokens = [value for row in rows for value in row]
    lengths = {"token-mean": len(tokens), "token-sum": 1, "seq-mean-token-sum": len(rows),
               "seq-mean-token-sum-norm": len(rows) * R}  # fmt: skip
    if mode == "seq-mean-token-mean":
        return sum(sum(row) / len(row) for row in rows) / len(rows)
    return sum(tokens) / lengths[mode]


SETTINGS = [
    {"loss_mode": "k3"}, {"loss_mode": "k2"}, {"loss_mode": "abs", "loss_max_clamp": 1.0}, {"loss_mode": TOPK},
    {"loss_mode": TOPK, "log_prob_min_clamp": -2.0, "loss_max_clamp": 0.5},
    {"loss_mode": "k1", "use_policy_gradient": True},
    {"loss_mode": "k1", "use_policy_gradient": True, "loss_max_clamp": 0.7, "clip_ratio": 0.1},
    {"loss_mode": TOPK, "use_policy_gradient": True},
]  # fmt: skip


@pytest.mark.parametrize("keys", SETTINGS, ids=lambda keys: "-".join(map(str, keys.values())))
@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_loss_and_gradient_equal_a_slow_loop(keys, mode):
    case, config = Case(), DistillationLossConfig(**keys)
    inputs, taught = case.inputs()
    denominators = Denominators.count(case.mask, R)
    loss, metrics = distillation_terms(inputs, taught, config, ActorConfig(loss_agg_mode=mode), denominators)
    expected = slow(case, config, mode)
    torch.testing.assert_close(loss, expected, rtol=1e-7, atol=1e-9)  # masked_mean adds 1e-8 to a count
    mine, theirs = (torch.autograd.grad(x, case.logits)[0] for x in (loss, expected))
    torch.testing.assert_close(mine, theirs, rtol=1e-7, atol=1e-9)
    assert float(metrics["distillation/loss"]) == pytest.approx(loss.item())
    assert mine[case.mask == 0].abs().sum() == 0, "what an environment wrote teaches nothing"


@pytest.mark.parametrize("keys", SETTINGS, ids=lambda keys: "-".join(map(str, keys.values())))
def test_the_split_into_micro_batches_changes_neither_gradient_nor_metric(keys):
    case, config = Case(seed=1, rows=6), DistillationLossConfig(**keys)
    denominators = Denominators.count(case.mask, R)

    def gradient(parts: list[Tensor]) -> tuple[Tensor, float, float]:
        inputs, taught = case.inputs()
        total, loss, lowest = torch.zeros((), dtype=torch.float64), 0.0, math.inf
        for part in parts:
            share, metrics = distillation_terms(
                cut(inputs, part), cut(taught, part), config, ActorConfig(), denominators
            )
            total, loss = total + share, loss + float(metrics["distillation/loss"])
            lowest = min(lowest, float(metrics["distillation/loss_min"]))
        return torch.autograd.grad(total, case.logits)[0], loss, lowest

    whole, parts = gradient([torch.arange(6)]), gradient(list(torch.tensor([4, 0, 2, 5, 1, 3]).split(2)))
    torch.testing.assert_close(whole[0], parts[0], rtol=1e-10, atol=1e-12)
    assert whole[1:] == pytest.approx(parts[1:])


def cut(columns: Any, part: Tensor) -> Any:
    return replace(columns, **{name: value[part] for name, value in vars(columns).items() if isinstance(value, Tensor)})


@pytest.mark.parametrize("keys", SETTINGS, ids=lambda keys: "-".join(map(str, keys.values())))
def test_padding_may_hold_anything(keys):
    case, config = Case(), DistillationLossConfig(**keys)
    empty = case.mask == 0

    def terms(fill: float) -> tuple[Tensor, dict[str, Tensor]]:
        inputs, taught = case.inputs()
        spoilt = {
            name: x.masked_fill(empty.view(*empty.shape, *[1] * (x.dim() - 2)), fill)
            for name, x in vars(taught).items()
        }
        inputs = replace(inputs, log_probs=inputs.log_probs.masked_fill(empty, fill))
        return distillation_terms(inputs, Taught(**spoilt), config, ActorConfig(), Denominators.count(case.mask))

    plain, spoilt = terms(0.0), terms(math.inf)
    assert plain[0].item() == spoilt[0].item()
    assert {name: float(x) for name, x in plain[1].items()} == {name: float(x) for name, x in spoilt[1].items()}


def test_nothing_that_counts_gives_zero():
    case = Case()
    inputs, taught = case.inputs()
    inputs = replace(inputs, mask=torch.zeros_like(case.mask))
    for mode in ("k3", TOPK):
        loss, metrics = distillation_terms(
            inputs, taught, DistillationLossConfig(loss_mode=mode), ActorConfig(), Denominators(0, 0, R)
        )
        assert loss.item() == 0 and all(float(value) == 0 for value in metrics.values())

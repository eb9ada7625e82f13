from __future__ import annotations

import itertools
import time
from collections import Counter

import numpy as np
import pytest

from paddock.runs.samples import Sample
from paddock.trainer import validation as v


def sample(score, group=0, source="gsm8k", **extras) -> Sample:
    return Sample("q", "a", score, 3, group, data_source=source, extras=extras)


def test_one_answer_a_prompt_gives_a_mean_and_pass_at_1_alone():
    found = v.validation_metrics([sample(1.0, 0), sample(0.0, 1)], returned=[])
    assert found == {"val-core/gsm8k/reward/mean@1": 0.5, "val-aux/gsm8k/reward/pass@1": 0.5}


def test_names_and_sections_of_four_answers_with_votes():
    rows = [
        sample(s, 0, acc=a, pred=p) for s, a, p in [(1, True, "7"), (-1, False, "8"), (-1, False, "9"), (1, True, "7")]
    ]
    found = v.validation_metrics(rows, returned=["acc", "pred"])
    core = {name for name in found if name.startswith("val-core/")}
    assert core == {
        f"val-core/gsm8k/acc/{m}" for m in ("mean@4", "best@4/mean", "best@4/std", "maj@4/mean", "maj@4/std")
    }
    statistics = [f"{s}@{k}/{m}" for s in ("best", "worst", "maj") for k in (2, 4) for m in ("mean", "std")]
    aux = {f"val-aux/gsm8k/reward/{m}" for m in ["mean@4", "std@4", *statistics]}
    aux |= {f"val-aux/gsm8k/acc/{m}" for m in ["std@4", "pass@1", "pass@2", "pass@4", *statistics]}
    assert set(found) - core == aux - {name.replace("core", "aux") for name in core}
    assert found["val-core/gsm8k/acc/mean@4"] == 0.5
    assert found["val-aux/gsm8k/reward/std@4"] == 1.0


def test_bootstrap_estimates_meet_their_exact_values():
    """k draws with replacement out of n answers of which c are right: best is 1 - (1 - c/n)^k, worst (c/n)^k."""
    found = v.prompt_metrics((1.0, 0, 0, 0), None, binary=True)
    assert found["best@2/mean"] == pytest.approx(1 - 0.75**2, abs=0.04)
    assert found["best@4/mean"] == pytest.approx(1 - 0.75**4, abs=0.04)
    assert found["worst@2/mean"] == pytest.approx(0.25**2, abs=0.02)
    p = found["best@4/mean"]
    assert found["best@4/std"] == pytest.approx((p * (1 - p)) ** 0.5)


def test_bootstrap_draws_are_those_of_the_legacy_generator_with_seed_42():
    state = np.random.RandomState(42)
    assert (np.stack([state.choice(5, size=3, replace=True) for _ in range(v.DRAWS)]) == v.draws(5, 3).T).all()


def test_majority_agrees_with_counting_votes_one_draw_at_a_time():
    votes = [0, 1, 0, 3, 1]
    expected = []
    for draw in v.draws(5, 4).T:
        winner = max(counts := Counter(votes[i] for i in draw), key=counts.get)  # the first drawn of equals
        expected.append(next(i for i in draw if votes[i] == winner))
    assert (v.majority(votes, *v.tally(5, 4)) == expected).all()


@pytest.mark.parametrize(("n", "correct", "k"), [(5, 2, 1), (5, 2, 3), (4, 0, 2), (4, 4, 1), (6, 1, 6), (6, 5, 2)])
def test_pass_at_k_is_the_share_of_subsets_with_a_right_answer(n, correct, k):
    subsets = list(itertools.combinations([1] * correct + [0] * (n - correct), k))
    assert v.pass_at(n, correct, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


def test_pass_at_k_is_left_out_where_scores_are_not_0_and_1():
    assert "pass@1" not in v.variable_metrics([[sample(0.5), sample(1.0)]], "reward")


def test_data_sources_do_not_mix_and_prompts_weigh_the_same():
    rows = [sample(1.0, 0, "a"), sample(0.0, 0, "a"), sample(0.0, 1, "a"), sample(0.0, 1, "a"), sample(1.0, 2, "b/c")]
    found = v.validation_metrics(rows, [])
    assert found["val-core/a/reward/mean@2"] == 0.25
    assert found["val-core/b/c/reward/mean@1"] == 1.0


def test_prompts_with_fewer_answers_count_at_their_own_n():
    rows = [[sample(1.0), sample(0.0)], [sample(1.0)]]
    assert v.variable_metrics(rows, "reward") | {} == v.variable_metrics(rows[:1], "reward") | {
        "mean@1": 1.0,
        "pass@1": 0.75,
    }


def test_only_numbers_that_the_scorer_returned_become_variables():
    rows = [sample(1.0, 0, index=17, pred="7", acc=1, note=None)]
    variables = {name.split("/")[2] for name in v.validation_metrics(rows, ["acc", "pred", "note"])}
    assert variables == {"reward", "acc"}


def test_sizes_double_up_to_n():
    assert [v.sizes(n) for n in (1, 2, 3, 8, 12)] == [[], [2], [2, 3], [2, 4, 8], [2, 4, 8, 12]]


def test_turns_are_summarised():
    found = v.validation_metrics([sample(1.0, 0, num_turns=2), sample(1.0, 1, num_turns=4)], [])
    assert found["val-aux/num_turns/mean"] == 3.0 and found["val-aux/num_turns/max"] == 4.0


def test_a_test_set_takes_seconds():
    random = np.random.RandomState(0)
    rows = [sample(float(s), g, acc=float(s), pred=str(s)) for g in range(1319) for s in random.randint(0, 2, 8)]
    start = time.perf_counter()
    v.validation_metrics(rows, ["acc", "pred"])
    assert time.perf_counter() - start < 10


def test_an_accuracy_that_some_answers_lack_is_not_the_accuracy_of_all():
    """A scorer that returns a dict for right answers, and a plain 0 for others."""
    rows = [sample(1.0, 0, acc=1.0), *(sample(0.0, group, acc=None) for group in (1, 2, 3))]
    found = v.validation_metrics(rows, returned=["acc"])
    assert found["val-core/gsm8k/reward/mean@1"] == 0.25
    assert found["val-aux/gsm8k/acc/mean@1"] == 1.0
    assert not [name for name in found if name.startswith("val-core/") and "/acc/" in name]

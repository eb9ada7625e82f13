"""The rounds of `filter_groups`: which groups a step trains, how old they are, and what a checkpoint keeps of them."""

from __future__ import annotations

import json
import random
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from byte_tokenizer import byte_tokenizer

from paddock.algorithms.selection import GroupBuffer
from paddock.config.schema import DataConfig, FilterGroupsConfig
from paddock.core.batch import Batch
from paddock.data.dataset import PromptDataset
from paddock.data.loader import Loader
from paddock.errors import UserError
from paddock.loading.load import load
from paddock.rollouts.episode import Episode, Span
from paddock.rollouts.rounds import Rounds
from paddock.rollouts.window import to_tensors
from paddock.trainer.reinforcement import train

SAMPLES, LAST, NEEDED = 2, 10, 3


@pytest.fixture(scope="module")
def dataset(tmp_path_factory) -> PromptDataset:
    file = tmp_path_factory.mktemp("rounds") / "rows.jsonl"
    rows = [{"prompt": f"{n}+{n}=", "data_source": "sums", "reward_model": {"ground_truth": n}} for n in range(11)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return PromptDataset(str(file), byte_tokenizer(), DataConfig(), key="data.train_files")


def opened(dataset: PromptDataset, prompts: int, staleness: int) -> tuple[Loader, Rounds]:
    loader = Loader(dataset, NEEDED, seed=3, look_ahead=False)
    return loader, Rounds(loader, prompts, SAMPLES, staleness, LAST, NEEDED, FilterGroupsConfig())


def is_informative(group: int) -> bool:
    return random.Random(f"group {group}").random() < 0.6


def scored(episodes: list[Episode]) -> Batch:
    """Returns finished responses of one token; those of an informative group fare differently."""
    ids, groups = [one.id for one in episodes], [one.group for one in episodes]
    rewards = [float(number % SAMPLES and is_informative(group)) for number, group in zip(ids, groups, strict=True)]
    ones = torch.ones(len(ids), 1, dtype=torch.long)
    return Batch(
        row=torch.tensor(ids), group=torch.tensor(groups), prompts=ones, prompt_mask=ones, responses=ones,
        mask=ones.float(), scores=torch.tensor(rewards)[:, None],
    )  # fmt: skip


def in_draw_order(dataset: PromptDataset, prompts: int) -> list[int]:
    """Returns the informative groups in the order in which they are drawn."""
    loader = Loader(dataset, NEEDED, seed=3, look_ahead=False)
    groups = [row.group for _ in range(100) for row in loader.next_prompts(prompts)]
    return [group for group in groups if is_informative(group)]


def play(dataset: PromptDataset, seed: int) -> None:
    """Plays a run that is stopped at random: groups are trained in draw order, each once, and none is too old."""
    chance = random.Random(seed)
    staleness = chance.randint(1, 3)
    prompts = chance.randint(1, staleness * NEEDED)
    loader, rounds = opened(dataset, prompts, staleness)
    expected = in_draw_order(dataset, prompts)
    for step in range(1, LAST + 1):
        while not rounds.buffer.full:
            head = rounds.fill(step)
            assert rounds.backlog <= max((staleness + 1) * NEEDED, NEEDED - 1 + prompts)
            rounds.take(replace(one, spans=[Span([1], [-1.0], step)], finished=True) for one in head.episodes.values())
            chosen = [one for one in rounds.unfinished() if chance.random() < 0.3]
            rounds.take(replace(one, spans=[Span([1], [-1.0], step)], finished=True) for one in chosen)
            rounds.decide(scored(list(rounds.pop(step).episodes.values())))
        batch, dropped = rounds.train(step)
        groups = list(dict.fromkeys(batch.group.tolist()))
        assert groups == expected[:NEEDED] and len(batch) == NEEDED * SAMPLES
        assert dropped == {"rollout/window/dropped/surplus": 0.0}
        expected = expected[NEEDED:]
        if chance.random() < 0.3:
            state, place = rounds.state(), loader.state_dict()
            saved = json.loads(json.dumps([state["batches"], state["decided"]]))
            loader, rounds = opened(dataset, prompts, staleness)
            loader.load_state_dict(place)
            rounds.load_state(saved[0], to_tensors(state["begun"]), saved[1])


def test_groups_are_trained_in_draw_order_once_each_and_none_is_too_old(dataset):
    for seed in range(100):
        play(dataset, seed)


def test_without_staleness_a_round_is_drawn_if_it_is_certain_and_surplus_is_dropped(dataset):
    _, rounds = opened(dataset, 2, 0)
    first = rounds.fill(1)
    assert len(rounds.batches) == 2  # three groups of four, at the least
    rounds.take(replace(one, spans=[Span([1], [-1.0], 1)], finished=True) for one in first.episodes.values())
    rounds.hopeless = 1
    assert not rounds.lacks
    rounds.hopeless = 2
    assert rounds.lacks and len(rounds.fill(1).rows) == 2 and len(rounds.batches) == 3
    rounds.pop(1)
    rounds.buffer = GroupBuffer(NEEDED, 0)
    episodes = [one for batch in rounds.batches for one in batch.episodes.values()]
    batch = scored(episodes).with_(scores=torch.tensor([0.0, 1.0] * 4)[:, None])
    rounds.batches.clear()
    rounds.decide(batch)
    kept, dropped = rounds.train(1)
    assert len(kept) == NEEDED * SAMPLES and dropped == {"rollout/window/dropped/surplus": 1.0}
    assert not rounds.state()["batches"]


SMALL = [
    "algorithm.adv_estimator=grpo", "data.train_batch_size=6", "data.gen_batch_size=4", "actor_rollout_ref.rollout.n=4",
    "actor_rollout_ref.actor.ppo_mini_batch_size=6", "trainer.test_freq=-1", "trainer.val_before_train=False",
    "trainer.logger=[file]", "data.dataloader_num_workers=0", "algorithm.filter_groups.enable=True",
    "trainer.save_freq=1", "trainer.total_training_steps=5",
]  # fmt: skip


def run(folder: Path, *keys: str) -> list[dict[str, float]]:
    assert train(load([*SMALL, f"trainer.default_local_dir={folder}", *keys]).config).finished
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: row[name] for name in row if not name.startswith(("timing", "perf"))} for row in rows]


def test_a_run_that_goes_on_at_any_step_equals_the_one_that_was_not_stopped(tmp_path):
    keys = ["algorithm.staleness=2", "actor_rollout_ref.rollout.max_num_seqs=24"]
    rows = run(tmp_path / "whole", *keys)
    assert max(row["training/off_policy/trajectory_staleness_worst/max"] for row in rows) in (1, 2)
    assert any(row["rollout/window/ready"] for row in rows)
    for stopped in range(1, 5):
        folder = tmp_path / f"stopped_{stopped}"
        shutil.copytree(tmp_path / "whole", folder)
        for later in range(stopped + 1, 6):
            shutil.rmtree(folder / f"global_step_{later}")
        (folder / "latest_checkpointed_iteration.txt").write_text(str(stopped))
        assert run(folder, *keys) == rows, stopped


def test_the_next_round_begins_beside_the_last_responses_and_changes_no_token(tmp_path, monkeypatch):
    """A session that ends sooner draws the same tokens as rounds that wait for each other."""
    from paddock.workers.rollout import Rollout

    sessions, go_on = [], Rollout.go_on
    monkeypatch.setattr(
        Rollout, "go_on", lambda self, asked, *rest: sessions.append(len(asked)) or go_on(self, asked, *rest)
    )
    dumps, counts = {}, {}
    for name, early in (("beside", True), ("after", False)):
        sessions.clear()
        folder = tmp_path / name
        run(folder, f"reward_model.launch_reward_fn_async={early}", f"trainer.rollout_data_dir={folder}/rollouts",
            "trainer.total_training_steps=2", "actor_rollout_ref.rollout.max_num_seqs=8")  # fmt: skip
        counts[name] = len(sessions)
        files = sorted((folder / "rollouts").glob("*.jsonl"), key=lambda path: int(path.stem))
        dumps[name] = [[json.loads(line)["answer"] for line in file.read_text().splitlines()] for file in files]
    assert dumps["beside"] == dumps["after"] and counts["beside"] > counts["after"]


def test_rounds_that_would_make_groups_too_old_are_refused(tmp_path):
    with pytest.raises(UserError, match="makes groups older") as error:
        run(tmp_path, "algorithm.staleness=1", "data.gen_batch_size=7")
    assert error.value.key == "data.gen_batch_size"

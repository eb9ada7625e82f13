"""Conversations that sessions of several weights draw: turns in flight go on, tools run on meanwhile."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from threading import Event

import pytest
import torch
from sessions import close
from talks import model, opened, rows, sampling

import paddock
from paddock.engines.rollout.base import Until
from paddock.engines.rollout.embedded import EmbeddedEngine
from paddock.errors import UserError
from paddock.loading.load import load
from paddock.rollouts.episode import Episode, begun
from paddock.trainer.reinforcement import train

KEYS = [
    "algorithm.adv_estimator=grpo", "data.train_batch_size=4", "actor_rollout_ref.rollout.n=4", "trainer.save_freq=1",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4", "trainer.test_freq=-1", "trainer.val_before_train=False",
    "trainer.logger=[file]", "data.dataloader_num_workers=0", "actor_rollout_ref.rollout.max_num_seqs=24",
    "data.max_response_length=48",
]  # fmt: skip


class Echo(paddock.Environment):
    """Answers each of three turns with a text of its own length, some of them late."""

    max_turns = 3

    def reset(self, row, seed):
        self.turn, self.wait = 0, 0.02 * (seed % 3)

    def step(self, answer):
        self.turn += 1
        time.sleep(self.wait)
        return paddock.Turn("+" + "1" * (1 + len(answer.tokens) % 3) + "=", reward=0.5, done=self.turn == 3)


@torch.no_grad()
def log_probs(policy, episode: Episode) -> list[float]:
    """Returns the log-prob of each token behind the prompt, by a forward pass over all of it."""
    behind = [token for span in episode.spans for token in span.tokens]
    tokens = torch.tensor([episode.prompt.tokens + behind])
    chosen = policy(tokens).logits[0, :-1].log_softmax(-1).gather(-1, tokens[0, 1:, None])[:, 0]
    return chosen[len(episode.prompt.tokens) - 1 :].tolist()


@torch.no_grad()
def test_every_span_of_a_conversation_has_the_log_probs_of_the_version_that_drew_it():
    policy, chance, noise = model("tiny"), random.Random(1), torch.Generator().manual_seed(0)
    environments, engine = opened(Echo), EmbeddedEngine(policy, max_num_seqs=6)
    first = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
    versions, several, ended = {}, 0, 0
    waiting = begun(rows(6), 3, 1)
    everyone = {episode.id for episode in waiting}
    for version in range(60):
        versions[version] = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
        wanted = [episode.id for episode in waiting[: chance.randint(1, 2)]]
        found = environments.run(engine, version, waiting, sampling(40), until=Until(wanted))
        waiting = [episode for episode in found if not episode.finished]
        for episode in [episode for episode in found if episode.finished]:
            everyone.remove(episode.id)
            ended, start = ended + 1, 0
            own = [span.version for span in episode.spans if span.log_probs]
            assert own == sorted(own) and episode.step == 1
            several += len(set(own)) > 1
            for span in episode.spans:
                if span.log_probs:
                    policy.load_state_dict(versions[span.version])
                    close(span.log_probs, log_probs(policy, episode)[start : start + len(span.tokens)], 3e-5)
                start += len(span.tokens)
        if not waiting:
            break
        policy.load_state_dict(versions[version])
        for parameter in policy.parameters():
            parameter += 0.003 * torch.randn(parameter.shape, generator=noise)
    policy.load_state_dict(first)
    environments.close()
    assert not everyone and ended == 18 and several > 3


def test_a_slow_tool_does_not_delay_a_step_that_does_not_train_its_row():
    trained = Event()

    class Slow(Echo):
        def step(self, answer):
            if self.late:
                trained.wait(30)
            return super().step(answer)

        def reset(self, row, seed):
            super().reset(row, seed)
            self.late = row["index"] == 1

    environments, engine = opened(Slow), EmbeddedEngine(model("tiny"), max_num_seqs=6)
    asked = begun(rows(2), 2, 1)
    found = environments.run(engine, 0, asked, sampling(40), until=Until([episode.id for episode in asked[:2]]))
    assert [episode.finished for episode in found] == [True, True, False, False]
    trained.set()
    rest = environments.run(engine, 1, found[2:], sampling(40), until=Until([episode.id for episode in found[2:]]))
    assert all(episode.finished for episode in rest)
    environments.close()


def test_what_raises_before_the_first_turn_closes_the_environments_of_the_others():
    closed = []

    class Fails(Echo):
        inline = True

        def reset(self, row, seed):
            super().reset(row, seed)
            if row["index"] == 2:
                raise RuntimeError("no")

        def close(self):
            closed.append(self)

    environments = opened(Fails)
    with pytest.raises(UserError, match="no"):
        environments.run(EmbeddedEngine(model("tiny")), 0, begun(rows(3), 1, 1), sampling(40))
    environments.close()
    assert sum(hasattr(environment, "turn") for environment in closed) == 3


ENVIRONMENT = """
import paddock


class Doubles(paddock.Environment):
    max_turns = 2

    def reset(self, row, seed):
        self.turn = 0
        with open(__file__ + ".resets", "a") as file:
            print(seed, file=file)

    def step(self, answer):
        self.turn += 1
        return paddock.Turn("1+1=", reward=float(answer.text.strip() == "2"), done=self.turn == 2)
"""


def test_a_run_in_an_environment_runs_ahead_and_goes_on(tmp_path: Path):
    (tmp_path / "doubles.py").write_text(ENVIRONMENT)
    keys = [*KEYS, f"environment={tmp_path}/doubles.py:Doubles", "algorithm.staleness=2",
            f"trainer.default_local_dir={tmp_path}/run"]  # fmt: skip
    for steps in (3, 6):
        assert train(load([*keys, f"trainer.total_training_steps={steps}"]).config).finished
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    ages = [line["training/off_policy/trajectory_staleness_worst/max"] for line in lines]
    assert len(lines) == 6 and 1 <= max(ages) <= 2
    assert all(line["num_turns/mean"] >= 2 for line in lines)
    resets = (tmp_path / "doubles.py.resets").read_text().splitlines()
    assert len(resets) == 6 * 16, "no conversation that has begun is begun again"


def test_loops_in_verls_form_do_not_run_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UserError, match="turns of one version alone"):
        train(load([*KEYS, "algorithm.staleness=1", "trainer.total_training_steps=1", *loop(tmp_path)]).config)


def loop(folder: Path) -> list[str]:
    (folder / "loops.py").write_text(
        "from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput, register\n\n\n"
        "@register('mine')\n"
        "class Mine(AgentLoopBase):\n"
        "    async def run(self, sampling_params, **kwargs):\n"
        "        raise RuntimeError\n"
    )
    return ["actor_rollout_ref.model.external_lib=loops",
            "actor_rollout_ref.rollout.agent.default_agent_loop=mine",
            f"trainer.default_local_dir={folder}/loops"]  # fmt: skip

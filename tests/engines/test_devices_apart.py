"""What lies on the host beside a model on a device: choices of tokens, counts of steps, weights that are idle."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from tiny_models import tiny_model
from tiny_updates import WANT, in_role, loss_of, rollouts, settings
from torch.distributed.checkpoint import FileSystemReader

from paddock.core.masked import Denominators
from paddock.engines.train.base import Outputs
from paddock.engines.train.checkpoints import own_tensors
from paddock.engines.train.engine import Engine, offload_idle
from paddock.engines.train.shards import optimizer_fields, save_shards
from paddock.engines.train.single import SingleBackend
from paddock.loading.load import load
from paddock.models.reward_head import RewardModel
from paddock.workers.policy import Policy
from paddock.workers.role import MiniBatch
from paddock.workers.supervised import PairLearner


@pytest.mark.parametrize("mode", ["clip_cov", "kl_cov"])
def test_tokens_chosen_on_the_host_reach_the_loss_on_its_device(mode):
    """`meta` stands for the device: it refuses operands of two devices, as a GPU does."""
    config = load(["algorithm.adv_estimator=grpo", f"actor_rollout_ref.actor.policy_loss.loss_mode={mode}"]).config
    batch = rollouts(3)
    mini = MiniBatch(batch.row, Denominators.count(batch.need("mask")), True, torch.zeros(batch.need("mask").shape))
    there = {name: column.to("meta") for name, column in batch.columns().items() if name != "row"}
    micro = batch.with_(**there)
    outputs = Outputs(log_probs=micro.need("old_log_probs") + 1, entropy=micro.need("old_log_probs"))
    share, _ = Policy(SimpleNamespace(), config).loss(mini, micro, outputs)
    assert share.device.type == "meta"


@pytest.mark.parametrize(("fused", "place"), [(True, "meta"), (False, "cpu")])
def test_a_fused_optimizer_finds_the_count_of_its_steps_where_the_weight_is(fused, place, tmp_path):
    engine = Engine(SingleBackend(in_role(tiny_model(), "actor"), settings()))
    batch = rollouts()
    engine.train_step(engine.micro_batches(batch), loss_of("actor", batch), WANT["actor"])
    save_shards(tmp_path, own_tensors(engine.model, engine.updater, None), engine.updater)
    known = FileSystemReader(tmp_path).read_metadata().state_dict_metadata
    name, master = next(iter(engine.updater.named_masters().items()))
    engine.updater.optimizer.param_groups[0]["fused"] = fused
    elsewhere = master.to("meta")
    found = optimizer_fields(f"optimizer/{name}/", known, elsewhere, engine.updater.number_device(elsewhere))
    assert found["step"].device.type == place and found["exp_avg"].device.type == "meta"


def test_a_reward_model_whose_weights_are_away_is_exported_whole(tmp_path):
    found = {}
    for away in (False, True):
        model = tiny_model()
        model.set_attn_implementation("paddock")
        engine = Engine(SingleBackend(RewardModel(model.base_model, False).for_pairs(0), settings(offload_params=away)))
        offload_idle(engine, least=1)  # as on a GPU
        engine.move("host")
        folder = Path(tmp_path) / str(away)
        PairLearner(engine).export(folder)
        assert not away or engine.offload.on_host
        found[away] = load_file(folder / "model.safetensors")
    assert found[True].keys() == found[False].keys()
    assert all(torch.equal(tensor, found[False][name]) for name, tensor in found[True].items())

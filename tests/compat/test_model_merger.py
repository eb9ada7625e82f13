"""`python -m verl.model_merger`: checkpoints of Paddock's and shards of verl's FSDP become folders of transformers."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from tiny_models import save_tiny
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForCausalLM

from paddock.commands.guard import PLAN_ONLY
from paddock.errors import UserError
from paddock.verl.merger import run

MERGE = ["merge", "--backend", "fsdp"]


def as_verl_saves(weights, folder, mesh_shape, names):
    """Writes one file a rank, each with real DTensors of that rank: rows are cut over the mesh's last dimension."""
    world, cuts = torch.Size(mesh_shape).numel(), mesh_shape[-1]
    folder.mkdir()
    for rank in range(world):
        dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
        try:
            mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=names)
            placements = [Replicate()] * (len(mesh_shape) - 1) + [Shard(0)]
            held = {}
            for name, whole in weights.items():
                parts = torch.chunk(whole, cuts)
                own = (parts[rank % cuts] if rank % cuts < len(parts) else whole[:0]).clone()
                held[name] = DTensor.from_local(own, mesh, placements, shape=whole.shape, stride=whole.stride())
            torch.save(held, folder / f"model_world_size_{world}_rank_{rank}.pt")
        finally:
            dist.destroy_process_group()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("tiny") / "model")


@pytest.mark.parametrize(("mesh", "names"), [((3,), ("fsdp",)), ((2, 2), ("ddp", "fsdp"))])
def test_shards_of_several_ranks_become_the_model_that_was_sharded(tmp_path, model, mesh, names):
    whole = AutoModelForCausalLM.from_pretrained(model)
    local, target = tmp_path / "actor", tmp_path / "merged"
    as_verl_saves(whole.state_dict(), local, mesh, names)
    (local / "huggingface").symlink_to(model)
    assert run([*MERGE, "--local_dir", str(local), "--target_dir", str(target)]) == 0
    merged = AutoModelForCausalLM.from_pretrained(target).state_dict()
    for name, value in whole.state_dict().items():
        assert torch.equal(merged[name].float(), value.to(torch.bfloat16).float()), name
    assert (target / "tokenizer.json").is_file()


def test_a_missing_rank_is_named(tmp_path, model):
    as_verl_saves({"x": torch.ones(4, 2)}, tmp_path / "actor", (2,), ("fsdp",))
    (tmp_path / "actor" / "huggingface").symlink_to(model)
    (tmp_path / "actor" / "model_world_size_2_rank_1.pt").unlink()
    with pytest.raises(UserError, match="1 of 2 ranks are missing, the first of rank 1"):
        run([*MERGE, "--local_dir", str(tmp_path / "actor"), "--target_dir", str(tmp_path / "out")])


def test_weights_of_another_model_are_refused(tmp_path, model):
    as_verl_saves({"x": torch.ones(4, 2)}, tmp_path / "actor", (2,), ("fsdp",))
    (tmp_path / "actor" / "huggingface").symlink_to(model)
    with pytest.raises(UserError, match=r"not those of the model of its config\.json"):
        run([*MERGE, "--local_dir", str(tmp_path / "actor"), "--target_dir", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


def test_a_checkpoint_of_ours_is_exported(tmp_path, model):
    assert run([*MERGE, "--local_dir", str(model), "--target_dir", str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["test", "--backend", "fsdp", "--local_dir", "x", "--test_hf_dir", "y"], "compares two models"),
        ([*MERGE, "--local_dir", "/nowhere"], "no such folder"),
        ([*MERGE, "--local_dir", "x", "--hf_upload_path", "a/b"], "nothing is uploaded"),
    ],
)
def test_what_is_not_done_is_refused_by_name(arguments, reason):
    with pytest.raises(UserError, match=reason):
        run(arguments)


def test_a_plan_names_the_folders_and_writes_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv(PLAN_ONLY, "1")
    assert run([*MERGE, "--local_dir", "/far/actor", "--target_dir", str(tmp_path / "out")]) == 0
    assert "/far/actor" in capsys.readouterr().out and not (tmp_path / "out").exists()


def test_a_megatron_checkpoint_of_verls_is_refused_with_the_reason(tmp_path):
    (tmp_path / "dist_ckpt").mkdir()
    with pytest.raises(UserError, match="needs Megatron to be read"):
        run(["merge", "--backend", "megatron", "--local_dir", str(tmp_path)])

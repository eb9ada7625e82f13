"""On a GPU, weights for an engine in another process of the same device travel as a handle of its memory."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from typing import Any

import pytest
import torch
from tiny_models import tiny_model

from paddock.config.topology import rolls_out_beside
from paddock.core.device import memory_in_use
from paddock.engines.train.engine import Engine
from paddock.engines.train.settings import Settings
from paddock.engines.train.single import SingleBackend
from paddock.loading.load import load
from paddock.workers.policy import Policy
from paddock.workers.weight_sender import Bucket, WeightSender

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
KEYS = [
    "trainer.device=cuda", "trainer.n_gpus_per_node=1", "algorithm.adv_estimator=grpo",
    "actor_rollout_ref.hybrid_engine=False", "actor_rollout_ref.rollout.name=vllm",
    "data.train_files=builtin:addition/train", "data.val_files=[]",
]  # fmt: skip
READER = """\
import pickle, sys, torch
while size := int.from_bytes(sys.stdin.buffer.read(8), "big"):
    bucket = pickle.loads(sys.stdin.buffer.read(size))
    found = {name: tensor.cpu() for name, tensor in bucket.unpacked(torch.device("cuda"))}
    del bucket
    answer = pickle.dumps({name: (str(t.dtype), t.float().numpy()) for name, t in found.items()})
    sys.stdout.buffer.write(len(answer).to_bytes(8, "big") + answer)
    sys.stdout.buffer.flush()
"""


class Reader:
    """A process of its own, as that of an engine is: it opens buckets and returns what is in them."""

    def __init__(self) -> None:
        pipe, paths = subprocess.PIPE, {"PYTHONPATH": os.pathsep.join(sys.path)}
        command = [sys.executable, "-c", READER]
        self.process: Any = subprocess.Popen(command, stdin=pipe, stdout=pipe, env=os.environ | paths)

    def read(self, bucket: Bucket) -> tuple[int, dict[str, Any]]:
        """Returns the size of what travelled, and name, type and numbers of what arrived."""
        sent = pickle.dumps(bucket)
        self.process.stdin.write(len(sent).to_bytes(8, "big") + sent)
        self.process.stdin.flush()
        size = int.from_bytes(self.process.stdout.read(8), "big")
        return len(sent), pickle.loads(self.process.stdout.read(size))

    def close(self) -> None:
        self.process.stdin.write((0).to_bytes(8, "big"))
        self.process.stdin.close()
        assert self.process.wait(60) == 0


def sender_of(engine: Engine, *keys: str) -> WeightSender:
    config = load([*KEYS, *keys]).config
    sender = WeightSender(Policy(engine, config), config.actor_rollout_ref.rollout, rolls_out_beside(config))
    sender.size = 2**20
    return sender


def test_an_engine_beside_the_trainer_reads_the_bytes_that_another_would_get_through_the_host():
    engine = Engine(SingleBackend(tiny_model(hidden_size=512, vocab_size=8192).to("cuda", torch.bfloat16), Settings()))
    beside, apart = sender_of(engine, "actor_rollout_ref.rollout.nnodes=0"), sender_of(engine)
    assert beside.shared is not None and apart.shared is None
    reader, rest = Reader(), memory_in_use(torch.device("cuda"))
    names: list[str] = []
    try:
        while beside.unsent():
            handle, plain = beside.next_bucket(), apart.next_bucket()
            assert handle is not None and plain is not None
            size, arrived = reader.read(handle)
            assert size < 10_000 + 200 * len(handle.tensors)
            expected = plain.unpacked(torch.device("cpu"))
            assert list(arrived) == [name for name, _ in expected]
            for name, tensor in expected:
                dtype, numbers = arrived[name]
                assert dtype == str(tensor.dtype) and torch.equal(torch.tensor(numbers), tensor.float())
            names += arrived
    finally:
        reader.close()
    del handle
    beside.finish()
    torch.cuda.ipc_collect()
    assert names == [name for name, _ in engine.weights()]
    assert memory_in_use(torch.device("cuda")) == rest

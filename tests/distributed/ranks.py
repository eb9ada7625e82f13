"""Processes that stay for a whole test file, joined by gloo or NCCL: `ranks(function, *args)` runs it on each."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from devices import DEVICE, joined, on_host


def serve(rank: int, size: int, pipe: Any) -> None:
    """Joins the other ranks for each order: groups that an order makes hold memory of a GPU until all are left."""
    torch.set_num_threads(1)
    from paddock.core.device import device_of, share_device
    from paddock.core.processes import Rendezvous

    device = device_of(DEVICE.type)
    if device.type != "cpu":
        share_device(device, size)
    while (order := pipe.recv()) is not None:
        store, name, function, args = order
        try:
            with joined(Rendezvous(rank, size, store, name, timeout=60), device):
                answer = on_host(function(rank, *args))
                with suppress(RuntimeError):  # of a rank that has failed
                    dist.barrier()  # nobody leaves while another one still connects
            pipe.send((answer, None))
        except Exception as error:
            pipe.send((error, traceback.format_exc()))


class Ranks:
    def __init__(self, size: int):
        # a fork of the process of the tests has imported torch, but cannot use a GPU that this process has used
        context = mp.get_context("fork" if DEVICE.type == "cpu" else "spawn")
        pairs = [context.Pipe() for _ in range(size)]
        self.pipes = [ours for ours, _ in pairs]
        self.processes = [
            context.Process(target=serve, args=(rank, size, theirs), daemon=True)
            for rank, (_, theirs) in enumerate(pairs)
        ]
        for process in self.processes:
            process.start()
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def __call__(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """What each rank returns; the first error, with its traceback."""
        name = f"order {self.store.add('orders', 1)}"
        for pipe in self.pipes:
            pipe.send((("127.0.0.1", self.store.port), name, function, args))
        answers = [pipe.recv() for pipe in self.pipes]
        for answer, trace in answers:
            if trace is not None:
                answer.add_note(trace)
                raise answer
        return [answer for answer, _ in answers]

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.send(None)
        for process in self.processes:
            process.join(20)
            process.kill()

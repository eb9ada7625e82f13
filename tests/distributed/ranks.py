"""Processes that stay for a whole test file, joined by gloo or NCCL: `ranks(function, *args)` runs it on each."""

from __future__ import annotations

import socket
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.multiprocessing as mp
from devices import DEVICE, joined, on_host


def serve(rank: int, size: int, address: str, pipe: Any) -> None:
    torch.set_num_threads(1)
    from paddock.core.device import device_of, share_device
    from paddock.core.processes import Rendezvous

    device = device_of(DEVICE.type)
    if device.type != "cpu":
        share_device(device, size)
    with joined(Rendezvous(rank, size, address, timeout=60), device):
        while (order := pipe.recv()) is not None:
            function, args = order
            try:
                pipe.send((on_host(function(rank, *args)), None))
            except Exception as error:
                pipe.send((error, traceback.format_exc()))


class Ranks:
    def __init__(self, size: int):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{free.getsockname()[1]}"
        # a fork of the process of the tests has imported torch, but cannot use a GPU that this process has used
        context = mp.get_context("fork" if DEVICE.type == "cpu" else "spawn")
        pairs = [context.Pipe() for _ in range(size)]
        self.pipes = [ours for ours, _ in pairs]
        self.processes = [
            context.Process(target=serve, args=(rank, size, address, theirs), daemon=True)
            for rank, (_, theirs) in enumerate(pairs)
        ]
        for process in self.processes:
            process.start()

    def __call__(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """What each rank returns; the first error, with its traceback."""
        for pipe in self.pipes:
            pipe.send((function, args))
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

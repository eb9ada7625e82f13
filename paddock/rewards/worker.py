"""The process that runs scorers: reads chunks of requests from a socket, answers each request as soon as it is scored.

Chunk in: (target, seconds, requests). Messages out: (READY, None) once the target is loaded, then for each request
(SCORED, score) or (FAILED, reason), in order. A chunk whose target cannot be loaded is answered by one FAILED.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from multiprocessing.connection import Connection

from paddock.rewards.custom import Failed, Target, load
from paddock.rewards.score import Score, ScoreRequest

READY, SCORED, FAILED = "ready", "scored", "failed"
GRACE = 2.0  # seconds beyond the limit, in which the parent would have killed


def serve(descriptor: int) -> None:
    """Works until the other end closes."""
    connection = Connection(descriptor)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    scorers: dict[Target, Callable[[ScoreRequest], Score]] = {}
    while True:
        try:
            target, seconds, requests = connection.recv()
            answer(connection, scorers, target, seconds, requests)
        except (EOFError, BrokenPipeError, ConnectionResetError):
            return


def answer(
    connection: Connection,
    scorers: dict[Target, Callable[[ScoreRequest], Score]],
    target: Target,
    seconds: float,
    requests: list[ScoreRequest],
) -> None:
    try:
        score = scorers.get(target) or scorers.setdefault(target, load(target))
    except Failed as error:
        return connection.send((FAILED, str(error)))
    connection.send((READY, None))
    for request in requests:
        # If the parent is gone nobody kills a scorer that hangs: the kernel does, even while native code runs.
        signal.setitimer(signal.ITIMER_REAL, seconds + GRACE)
        try:
            connection.send((SCORED, score(request)))
        except Failed as error:
            connection.send((FAILED, str(error)))
    signal.setitimer(signal.ITIMER_REAL, 0)

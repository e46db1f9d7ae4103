"""Lets ranks take turns: each rank is a thread, and exactly one of them runs.

A thousand threads would spend most of their time competing for the interpreter's lock. Here a rank
runs until it has to wait for a message, and then hands over to a rank whose message has arrived.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch

from hvd_sparse.errors import PeerLostError, PlanError

Result = TypeVar("Result")

STACK_BYTES = 1 << 20


class Scheduler:
    """Runs P ranks in turns; all methods except `run` are called by the rank whose turn it is."""

    @staticmethod
    def pick(count: int) -> int:
        """Which of `count` ranks that can continue is next; 0 has waited longest."""
        return 0

    def __init__(self, world_size: int) -> None:
        self._turns = [threading.Lock() for _ in range(world_size)]
        self._ready = list(range(world_size))
        self._waiting: dict[int, str] = {}
        self._failure: BaseException | None = None
        for turn in self._turns:
            turn.acquire()

    def wait(self, rank: int, reason: str) -> None:
        """Let the other ranks run until one of them wakes this one; PeerLostError if one fails."""
        self._waiting[rank] = reason
        self._hand_over()
        self._turns[rank].acquire()
        if self._failure is not None:
            raise PeerLostError(f"another rank failed: {self._failure!r}") from self._failure

    def wake(self, rank: int) -> None:
        """Let a waiting rank continue. A rank that does not wait is left alone."""
        if self._waiting.pop(rank, None) is not None:
            self._ready.append(rank)

    def fail(self, error: BaseException) -> None:
        """Make all waits fail, present and future ones."""
        if self._failure is None:
            self._failure = error
            for rank in [*self._waiting, *self._ready]:
                self._turns[rank].release()
            self._waiting.clear()
            self._ready.clear()

    def run(self, fn: Callable[[int], Result]) -> list[Result]:
        """Run `fn(rank)` on every rank, once; returns their results in the order of the ranks.

        Raises:
            BaseException: What the first rank to fail raised.
            PlanError: All ranks wait for messages, and no rank is left to send one.
        """
        results: dict[int, Result] = {}

        def body(rank: int) -> None:
            self._turns[rank].acquire()
            if self._failure is not None:
                return
            try:
                results[rank] = fn(rank)
            except BaseException as error:  # every kind has to reach the caller
                self.fail(error)
            else:
                self._hand_over()

        with _small_threads():
            threads = [
                threading.Thread(target=body, args=(rank,), name=f"rank {rank}", daemon=True)
                for rank in range(len(self._turns))
            ]
            for thread in threads:
                thread.start()
            self._hand_over()
            for thread in threads:
                thread.join()
        if self._failure is not None:
            raise self._failure
        return [results[rank] for rank in range(len(threads))]

    def _hand_over(self) -> None:
        if self._failure is not None:
            return
        if self._ready:
            self._turns[self._ready.pop(self.pick(len(self._ready)))].release()
        elif self._waiting:
            rank, reason = min(self._waiting.items())
            self.fail(
                PlanError(
                    f"{len(self._waiting)} ranks wait for what nobody sends: rank {rank} for "
                    f"{reason}, for one; the ranks make different calls"
                )
            )


@contextmanager
def _small_threads() -> Iterator[None]:
    """Small stacks, and operations of torch that take no further threads."""
    threads, stack_bytes = torch.get_num_threads(), threading.stack_size(STACK_BYTES)
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        threading.stack_size(stack_bytes)

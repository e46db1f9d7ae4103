"""Buckets overlap: the next ones are selected while one is exchanged, and nothing else changes."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from hvd_sparse.accumulator import Accumulator
from hvd_sparse.collectives import OkTopk
from hvd_sparse.engine import Engine, Method, TensorSpec
from hvd_sparse.engine.bucket import Bucket, Phase
from hvd_sparse.engine.exchange import decode, reduce, select
from hvd_sparse.errors import TransportError
from hvd_sparse.methods import METHODS
from hvd_sparse.selectors import ReusedThreshold
from hvd_sparse.streams import SparseStream
from hvd_sparse.transports import Transport, run_ranks
from tests.laws.test_step_commit import flattened

NUMEL = 400
NAMES = ("a", "b", "c", "d")
SPECS = {name: TensorSpec(name, (NUMEL,), "torch.float32") for name in NAMES}
DEADLINE_S = 20.0


class Watched(ReusedThreshold):
    """Says when it has selected, and fails where it is told to."""

    def __init__(self, selected: list[str], failing: str = "") -> None:
        super().__init__(4)
        self._selected, self._failing = selected, failing

    def select(self, accumulator: Accumulator, k: int) -> SparseStream:
        name = threading.current_thread().name
        taken = super().select(accumulator, k)
        self._selected.append(name)
        if name == self._failing:
            raise RuntimeError("no selection today")
        return taken


def method(selector: Callable[[], Any] = ReusedThreshold) -> Method:
    collective = partial(OkTopk, threshold_interval=3, repartition_interval=5)
    return Method(0.05, NUMEL, selector, collective, "a bucket for each tensor")


def gradients(rank: int, step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return {n: torch.randint(-99, 100, (NUMEL,), generator=generator).float() for n in NAMES}


def connected(transport: Transport, chosen: Method) -> Engine:
    engine = Engine(chosen)
    engine.connect(transport)
    return engine


def submit(engine: Engine, given: dict[str, Tensor], names: str = "abcd") -> None:
    for name in names:
        engine.submit(SPECS[name], given[name])


def results(engine: Engine) -> dict[str, Tensor]:
    engine.scale = engine.scale or 1.0
    return {name: engine.result(name).clone() for name in NAMES}


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_the_next_buckets_are_selected_while_one_waits_for_a_peer() -> None:
    """Rank 1 has no gradient of the first bucket before rank 0 has selected from all of them."""
    selected: list[str] = []
    all_selected = threading.Event()

    def worker(transport: Transport) -> tuple[int, int]:
        mine = selected if transport.rank == 0 else []
        engine = connected(transport, method(partial(Watched, mine)))
        submit(engine, gradients(transport.rank, 0))
        results(engine)
        del mine[:]
        given = gradients(transport.rank, 1)
        if transport.rank == 0:
            submit(engine, given)
            until(lambda: len(mine) == len(NAMES))
            exchanged = sum(bucket.steps for bucket in engine.stats().buckets)
            all_selected.set()
        else:
            assert all_selected.wait(DEADLINE_S)
            exchanged = sum(bucket.steps for bucket in engine.stats().buckets)
            submit(engine, given)
        results(engine)
        engine.disconnect()
        return len(mine), exchanged

    # When rank 0 had selected everything, no bucket of the second step was exchanged yet.
    assert run_ranks(2, worker, timeout_s=30.0) == [(len(NAMES), len(NAMES))] * 2
    assert set(selected) == {"hvd_sparse", "hvd_sparse.ahead"}


def test_one_bucket_needs_one_thread() -> None:
    before = threading.active_count()

    def worker(transport: Transport) -> None:
        engine = connected(transport, method())
        engine.submit(SPECS["a"], torch.ones(NUMEL))
        engine.scale = 1.0
        engine.result("a")
        names = [thread.name for thread in threading.enumerate()]
        assert "hvd_sparse" in names
        assert "hvd_sparse.ahead" not in names
        engine.disconnect()

    run_ranks(1, worker, timeout_s=30.0)
    assert threading.active_count() == before


@pytest.mark.parametrize("name", ["topk", "oktopk", "dgc", "exdyna", "clt_k", "randomk"])
def test_results_are_those_of_one_bucket_after_the_other(name: str) -> None:
    """The same steps by hand, in turn, give the same bits: results, and what stays behind."""
    arguments: dict[str, Any] = {"momentum": 0.5} if name == "dgc" else {}
    chosen = METHODS[name](density=0.05, bucket_numel=NUMEL, **arguments).make()

    def overlapped(transport: Transport) -> list[Any]:
        engine = connected(transport, chosen)
        found = []
        for step in range(7):
            submit(engine, gradients(transport.rank, step))
            found.append(results(engine))
            engine.settle()
        state = engine.state_dict()
        engine.disconnect()
        return [found, {n: state["residual"][n] for n in NAMES}]

    def in_turn(transport: Transport) -> list[Any]:
        buckets = [
            Bucket([spec], chosen, transport, torch.device("cpu")) for spec in SPECS.values()
        ]
        found = []
        for step in range(7):
            given = gradients(transport.rank, step)
            for bucket in buckets:
                bucket.put(0, given[bucket.specs[0].name])
                select(bucket)
                reduce(bucket)
                decode(bucket, 1.0, bucket.step_stats)
                bucket.is_open = False
                bucket.close_step()
            found.append({b.specs[0].name: b.views[0].clone() for b in buckets})
        held = {
            spec.name: tensors["residual"]
            for b in buckets
            for spec, tensors in b.split(b.memory.tensors())
        }
        return [found, held]

    ours, theirs = (run_ranks(3, worker, timeout_s=60.0) for worker in (overlapped, in_turn))
    assert [flattened(each) for each in ours] == [flattened(each) for each in theirs]


def test_a_failure_ahead_is_what_all_ranks_report() -> None:
    """Rank 0 fails as it selects ahead, while its first bucket waits for rank 1."""

    def worker(transport: Transport) -> None:
        failing = "hvd_sparse.ahead" if transport.rank == 0 else ""
        selected: list[str] = []
        engine = connected(transport, method(partial(Watched, selected, failing)))
        submit(engine, gradients(transport.rank, 0))

        def steps() -> None:
            for step in range(1, 4):  # who selects in the first step is chance
                results(engine)
                if transport.rank == 1:
                    until(lambda: engine.error is not None)
                submit(engine, gradients(transport.rank, step))

        error, words = (
            (RuntimeError, "no selection today") if transport.rank == 0 else (TransportError, None)
        )
        with pytest.raises(error, match=words):
            steps()
        engine.disconnect()

    run_ranks(2, worker, timeout_s=DEADLINE_S)


@pytest.mark.parametrize("ends", ["disconnect", "collect"])
def test_what_was_selected_ahead_goes_back(ends: str) -> None:
    """The first bucket waits for a peer that never comes to it, the others are selected."""
    before = threading.active_count()
    done = threading.Barrier(2)

    def worker(transport: Transport) -> None:
        selected: list[str] = []
        engine = connected(transport, method(partial(Watched, selected)))
        submit(engine, gradients(transport.rank, 0))
        results(engine)
        engine.settle()
        state = flattened(engine.state_dict())
        del selected[:]
        if transport.rank == 0:
            submit(engine, gradients(0, 1))
            until(lambda: len(selected) == len(NAMES))
        done.wait(DEADLINE_S)
        if ends == "disconnect":
            engine.disconnect()
            assert flattened(engine.state_dict()) == state
        del engine
        gc.collect()

    run_ranks(2, worker, timeout_s=DEADLINE_S)
    until(lambda: threading.active_count() <= before)


def test_a_worker_that_is_closed_by_its_second_thread() -> None:
    """As where the engine is collected there: the first thread finishes, and then closes."""
    engines: list[Engine] = []

    class Closing(ReusedThreshold):
        def select(self, accumulator: Accumulator, k: int) -> SparseStream:
            if threading.current_thread().name == "hvd_sparse.ahead" and engines:
                engines.pop()._worker.close()
            return super().select(accumulator, k)

    def worker(transport: Transport) -> None:
        engine = connected(transport, method(Closing if transport.rank == 0 else ReusedThreshold))
        submit(engine, gradients(transport.rank, 0))
        results(engine)
        if transport.rank == 0:
            threads = list(engine._worker._threads)
            engines.append(engine)
            submit(engine, gradients(0, 1), "a")
            until(lambda: engine._buckets[0].phase is Phase.SELECTED)  # it waits for rank 1
            submit(engine, gradients(0, 1), "bcd")
            until(lambda: not engines)
            assert threads[0].is_alive()
            assert engine._worker.transport is transport
        done.wait(DEADLINE_S)
        if transport.rank == 1:
            engine.submit(SPECS["a"], gradients(1, 1)["a"])
            until(lambda: engine._buckets[0].phase is Phase.EXCHANGED)
        else:
            for thread in threads:
                thread.join(DEADLINE_S)
                assert not thread.is_alive()
            assert engine._worker.transport is None
        done.wait(DEADLINE_S)
        engine.disconnect()

    done = threading.Barrier(2)
    run_ranks(2, worker, timeout_s=DEADLINE_S)


def test_spent_gradients_go_on_a_background_thread() -> None:
    """Giving large ones back to the system takes milliseconds, which the optimizer waited for."""
    ended_on: list[str] = []

    def note() -> None:
        ended_on.append(threading.current_thread().name)

    def all_over(ends: list[weakref.finalize[[], Tensor]]) -> bool:
        return not any(end.alive for end in ends)

    def worker(transport: Transport) -> None:
        engine = connected(transport, method())
        for asked in (False, True, True):
            given = gradients(transport.rank, 0)
            ends = [weakref.finalize(g, note) for g in given.values()]
            submit(engine, given)
            del given
            results(engine)
            assert all(end.alive for end in ends)  # the optimizer has not read the results yet
            if asked:
                engine.let_go()
            else:
                engine.settle()
            until(partial(all_over, ends))
        engine.disconnect()

    run_ranks(1, worker, timeout_s=DEADLINE_S)
    assert "hvd_sparse" not in ended_on[: len(NAMES)]
    assert set(ended_on[len(NAMES) :]) == {"hvd_sparse"}


def test_a_whole_step_is_waited_for_without_a_look() -> None:
    """Not before all gradients are there, and not after a failure; else until it is exchanged."""
    come = threading.Event()

    def worker(transport: Transport) -> None:
        engine = connected(transport, method())
        assert engine.wait(DEADLINE_S)  # there is no plan
        submit(engine, gradients(transport.rank, 0))
        results(engine)
        submit(engine, gradients(transport.rank, 1), "abc")
        assert engine.wait(DEADLINE_S)  # "d" is missing
        if transport.rank == 0:
            submit(engine, gradients(0, 1), "d")
            waiting = threading.Thread(target=engine.wait, args=(DEADLINE_S,))
            waiting.start()
            waiting.join(0.05)
            assert waiting.is_alive()
            come.set()
            waiting.join(DEADLINE_S)
            assert all(bucket.phase is Phase.EXCHANGED for bucket in engine._buckets)
        else:
            assert come.wait(DEADLINE_S)
            submit(engine, gradients(1, 1), "d")
        results(engine)
        submit(engine, gradients(transport.rank, 2), "abcd" if transport.rank == 0 else "abc")
        if transport.rank == 0:
            threading.Timer(0.05, engine.fail, [RuntimeError("no more")]).start()
            assert engine.wait(DEADLINE_S)
            assert engine.error is not None
        engine.disconnect()

    run_ranks(2, worker, timeout_s=DEADLINE_S)


def test_a_step_without_a_gradient_is_given_up_once_its_exchanges_are_over() -> None:
    """Rank 1 is late; what both have begun ends, and all stop before the same bucket."""

    def worker(transport: Transport) -> None:
        engine = connected(transport, method())
        submit(engine, gradients(transport.rank, 0))
        results(engine)
        time.sleep(0.5 * transport.rank)
        submit(engine, gradients(transport.rank, 1), "abd")
        assert engine.wait(DEADLINE_S)
        phases = [bucket.phase for bucket in engine._buckets]
        assert phases[:3] == [Phase.EXCHANGED, Phase.EXCHANGED, Phase.COLLECTING]
        engine.reassign(engine.assignment)
        submit(engine, gradients(transport.rank, 2))
        results(engine)
        engine.disconnect()

    run_ranks(2, worker, timeout_s=DEADLINE_S)


def test_a_bucket_that_is_not_applied_keeps_pace_with_the_others() -> None:
    """A state has one number of steps for all of them."""

    def worker(transport: Transport) -> None:
        engine = connected(transport, method())
        for step in range(4):
            submit(engine, gradients(transport.rank, step))
            results(engine)
            engine.settle({"b"} if step % 2 else ())
        assert {bucket.step for bucket in engine._buckets} == {4}
        assert engine.state_dict()["step"] == 4
        engine.disconnect()

    run_ranks(2, worker, timeout_s=DEADLINE_S)

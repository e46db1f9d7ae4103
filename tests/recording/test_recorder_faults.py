"""Recording never ends training: whatever breaks, it warns once, stops, and changes no result."""

from __future__ import annotations

import gc
import logging
import os
import re
import resource
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from torch import Tensor

from hvd_sparse import ConfigError, Recorder
from hvd_sparse.collectives import TopkAllgather
from hvd_sparse.engine import Engine, Method, TensorSpec
from hvd_sparse.engine import account as account_module
from hvd_sparse.recording.recorder import Budget
from hvd_sparse.selectors import ReusedThreshold
from hvd_sparse.transports import Transport
from hvd_sparse.transports.local import run_ranks
from tests.recordings import last_run

NUMEL, STEPS, RANKS = 500, 9, 3
SPECS = [TensorSpec(f"layer{i}.weight", (NUMEL,), "torch.float32") for i in range(2)]

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(autouse=True)
def every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step is recorded, and ranks are compared in every third one."""
    monkeypatch.setattr(Budget, "covers", lambda self, cost_s: True)
    monkeypatch.setattr(account_module, "COMPARISON_INTERVAL", 3)


def results(
    recorder_of: Callable[[int], Any],
    between: Callable[[int, int], object] = lambda rank, step: None,
) -> list[tuple[Tensor, dict[str, Any]]]:
    """Every rank's reduced gradients of all steps, and its residuals; plans anew after step 6."""

    def worker(transport: Transport) -> tuple[Tensor, dict[str, Any]]:
        method = Method(0.05, NUMEL, partial(ReusedThreshold, 8), TopkAllgather, "test")
        engine = Engine(method, recorder_of(transport.rank))
        engine.connect(transport)
        generator = torch.Generator().manual_seed(transport.rank)
        reduced = []
        for step in range(1, STEPS + 1):
            between(transport.rank, step)
            if step == 7:
                engine.reassign(method)
            for spec in SPECS:
                engine.submit(spec, torch.randn(NUMEL, generator=generator))
            engine.scale = 0.5
            reduced += [engine.result(spec.name).clone() for spec in SPECS]
        state = engine.state_dict()
        engine.disconnect()
        return torch.stack(reduced), state

    return run_ranks(RANKS, worker, timeout_s=20.0)


def residuals(state: dict[str, Any]) -> Tensor:
    return torch.stack([state["residual"][spec.name] for spec in SPECS])


@contextmanager
def one_warning(message: str) -> Iterator[None]:
    """Exactly one warning comes of the block, and this is it."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    gc.collect()
    (only,) = [str(w.message) for w in caught]
    assert re.search(message, only), only


def assert_same(recorded: Any) -> None:
    """Bit for bit what training without any recorder gives."""
    unrecorded = results(lambda rank: None)
    for (mine, my_state), (plain, plain_state) in zip(recorded, unrecorded, strict=True):
        assert torch.equal(mine, plain)
        assert torch.equal(residuals(my_state), residuals(plain_state))


# -- files -----------------------------------------------------------------------------------------


def test_a_full_disk() -> None:
    with one_warning(
        r"rank 0: recording to /dev/full is off from step 1 on.*No space left on device"
    ):
        recorded = results(lambda rank: Recorder("/dev/full"))
    assert_same(recorded)


def test_every_rank_may_fail_by_itself(tmp_path: Path) -> None:
    """Only rank 1 cannot write; the others record to the end, and ranks go on being compared."""
    (tmp_path / "run-1.jsonl").mkdir()
    with one_warning(r"rank 1: recording to .*run-1.jsonl is off from step 1 on.*Is a directory"):
        recorded = results(lambda rank: Recorder(tmp_path / "run-{rank}.jsonl"))
    assert_same(recorded)
    for rank in (0, 2):
        recording = last_run(tmp_path / f"run-{rank}.jsonl")
        assert recording.steps[-1]["step"] == STEPS
        assert len(recording.ranks) == 2 + 1


def test_rank_0_fails_between_two_comparisons(tmp_path: Path) -> None:
    """Its decision to compare stands until the next plan; from then on nobody compares."""

    class Failing(Recorder):
        def stepped(self, buckets: Any) -> None:
            super().stepped(buckets)
            if self._rank == 0 and self._step == 4:
                raise RuntimeError("out of luck")

    recorders = [Failing(tmp_path / "run-{rank}.jsonl") for _ in range(3)]
    with one_warning(r"rank 0: .* is off from step 4 on.*RuntimeError: out of luck"):
        recorded = results(lambda rank: recorders[rank])
    assert_same(recorded)
    assert recorders[0]._target is None  # else its last line would have sums of all steps
    assert recorders[1]._target is not None
    compared = [line["step"] for line in last_run(tmp_path / "run-1.jsonl").ranks]
    assert compared == [3, 6]


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (lambda path: path.mkdir(), "Is a directory"),
        (lambda path: path.symlink_to(path), "symbolic links"),
        (lambda path: path.parent.joinpath("a-file").write_text(""), None),
        (os.mkfifo, "No such device or address"),  # no reader: no endless wait
    ],
    ids=["directory", "loop", "nothing", "pipe"],
)
def test_a_path_that_cannot_be_written(
    tmp_path: Path, prepare: Callable[[Path], object], message: str | None
) -> None:
    path = tmp_path / "run.jsonl"
    prepare(path)
    if message is None:
        path, message = tmp_path / "a-file" / "run.jsonl", "Not a directory|File exists"
    with one_warning(f"off from step 1 on.*({message})"):
        recorded = results(lambda rank: Recorder(path))
    assert_same(recorded)


def test_a_pipe_that_nobody_empties(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    names = [f"a long name {i:05} {'x' * 100}" for i in range(1000)]

    class Wordy(Recorder):
        def stepped(self, buckets: Any) -> None:
            self._write({"kind": "plan", "names": names})

    with one_warning("off from step 1 on.*Resource temporarily unavailable"):
        results(lambda rank: Wordy(path))
    os.close(reader)


def test_a_missing_folder_is_made(tmp_path: Path) -> None:
    path = tmp_path / "not" / "there" / "run.jsonl"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        results(lambda rank: Recorder(path))
    assert last_run(path).steps[-1]["step"] == STEPS


TRAINING = """
import os, sys, torch
from hvd_sparse import Recorder
from hvd_sparse.collectives import TopkAllgather
from hvd_sparse.engine import Engine, Method, TensorSpec
from hvd_sparse.selectors import ReusedThreshold
from hvd_sparse.transports.local import LocalWorld

class Broken:
    def add_scalar(self, tag, scalar_value, global_step):
        if global_step >= {broken_at}:
            raise RuntimeError("the writer is closed")

if os.getuid() == 0:
    os.setuid(65534)
recorder = {recorder}
engine = Engine(Method(0.05, 500, ReusedThreshold, TopkAllgather, "test"), recorder)
engine.connect(LocalWorld(1).transport(0))
spec = TensorSpec("w", (500,), "torch.float32")
for _ in range(3):
    engine.submit(spec, torch.ones(500))
    engine.scale = 1.0
    engine.result("w")
{end}
print("trained")
"""


def trained_apart(
    recorder: str, *, end: str = "", broken_at: int = 0, rights: int = 0o777
) -> tuple[str, list[str]]:
    """What a process writes on standard error, and into a folder that another user made."""
    code = TRAINING.format(recorder=recorder, end=end, broken_at=broken_at)
    with TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(rights)
        command = [sys.executable, "-c", code, folder / "run.jsonl"]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        files = [file.name for file in folder.iterdir()]
    assert (ended.returncode, ended.stdout) == (0, "trained\n"), ended.stderr
    assert ended.stderr.count("Warning") == 1, ended.stderr
    return ended.stderr, files


def test_a_folder_without_permission() -> None:
    """Root may write everywhere, so another user trains, in a process of its own."""
    told, files = trained_apart("Recorder(sys.argv[1])", end="engine.disconnect()", rights=0o555)
    assert "off from step 1 on, training goes on: PermissionError" in told
    assert not files


@pytest.mark.parametrize(
    ("broken_at", "message"),
    [
        (1, "run.jsonl is off from step 1 on, training goes on: RuntimeError: the writer is"),
        (2, "run.jsonl could not be ended: RuntimeError: the writer is closed"),
    ],
)
def test_what_cannot_be_recorded_is_told_once(broken_at: int, message: str) -> None:
    """After the first step, the budget leaves all to the end of the process."""
    recorder = "Recorder(sys.argv[1], tensorboard=Broken(), share=1e-12)"
    told, files = trained_apart(recorder, broken_at=broken_at)
    assert message in told
    assert "Traceback" not in told
    assert files == ["run.jsonl"]


def test_a_limit_on_the_size_of_files(tmp_path: Path) -> None:
    """The disk is full in mid-training: what is there can be read, a part of a line too."""
    path = tmp_path / "run.jsonl"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (3000, before[1]))
        with one_warning(r"rank 0: .*off from step [2-9] on.*File too large"):
            recorded = results(lambda rank: Recorder(path))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert_same(recorded)
    recording = last_run(path)
    assert path.stat().st_size == 3000
    assert recording.torn_lines == 1
    assert 1 <= recording.steps[-1]["step"] < STEPS


def test_close_does_not_raise(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "run.jsonl")
    recorders = [recorder, None, None]
    results(recorders.__getitem__)
    os.close(recorder._file._file)  # type: ignore[union-attr]
    with one_warning("recording to .*run.jsonl could not be closed.*Bad file descriptor"):
        recorder.close()
    recorder.close()


def test_a_closed_recorder_goes_on(tmp_path: Path) -> None:
    recorders = [Recorder(tmp_path / "run.jsonl"), None, None]

    def close(rank: int, step: int) -> None:
        if rank == 0 and step == 4:
            recorders[0].close()  # type: ignore[union-attr]

    results(recorders.__getitem__, close)
    recording = last_run(tmp_path / "run.jsonl")
    assert [line["step"] for line in recording.steps] == list(range(1, STEPS + 1))


# -- what else may raise ---------------------------------------------------------------------------


def test_a_broken_tensorboard_writer() -> None:
    class Broken:
        def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
            if global_step == 5:
                raise OSError(28, "No space left on device")

    with one_warning("rank 0: recording to TensorBoard is off from step 5 on.*No space left"):
        recorded = results(lambda rank: Recorder(tensorboard=Broken()))
    assert_same(recorded)


@pytest.mark.parametrize("method", ["planned", "stepped", "compared"])
@pytest.mark.parametrize("failing_rank", [0, 1])
def test_an_observer_never_ends_a_step(method: str, failing_rank: int) -> None:
    class Observer:
        calls = 0

        def __init__(self, rank: int) -> None:
            self.rank = rank

        def planned(self, transport: Transport, buckets: Any) -> None:
            self._called("planned")

        def stepped(self, buckets: Any) -> None:
            self._called("stepped")

        def compared(self, seconds: Tensor) -> None:
            self._called("compared")

        def ended(self) -> None:
            pass

        def _called(self, name: str) -> None:
            self.calls += 1
            if name == method and self.rank == failing_rank:
                raise ZeroDivisionError("in the observer")

    observers = [Observer(rank) for rank in range(RANKS)]
    step = 3 if method == "compared" else 1
    with one_warning(f"rank {failing_rank}: .*off from step {step} on.*ZeroDivisionError"):
        recorded = results(observers.__getitem__)
    assert_same(recorded)
    assert observers[failing_rank].calls < observers[2].calls


def test_a_warning_that_is_an_error_ends_nothing() -> None:
    """As under `python -W error`, also where what handles the log fails, too."""

    class Broken(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise OSError(str(record))

    broken = Broken()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same(results(lambda rank: Recorder("/dev/full")))
        logging.getLogger("hvd_sparse").addHandler(broken)
        try:
            assert_same(results(lambda rank: Recorder("/dev/full")))
        finally:
            logging.getLogger("hvd_sparse").removeHandler(broken)


def test_ctrl_c_is_no_fault_of_the_observer() -> None:
    class Interrupted(Recorder):
        def stepped(self, buckets: Any) -> None:
            raise KeyboardInterrupt

    def worker(transport: Transport) -> None:
        engine = Engine(
            Method(0.05, NUMEL, ReusedThreshold, TopkAllgather, "test"), Interrupted("/dev/null")
        )
        engine.connect(transport)
        engine.submit(SPECS[0], torch.randn(NUMEL))
        engine.scale = 1.0
        with pytest.raises(KeyboardInterrupt):
            engine.result(SPECS[0].name)
        engine.disconnect()

    run_ranks(1, worker)


def test_a_recorder_serves_one_compression(tmp_path: Path) -> None:
    """Two engines that share one would mix their figures."""
    recorder = Recorder(tmp_path / "run.jsonl")

    def worker(transport: Transport) -> None:
        engines = [
            Engine(Method(0.05, NUMEL, ReusedThreshold, TopkAllgather, "test"), recorder)
            for _ in range(2)
        ]
        for engine in engines:
            engine.connect(transport)
        for _ in range(3):
            for engine in engines:
                engine.submit(SPECS[0], torch.randn(NUMEL))
                engine.scale = 1.0
                engine.result(SPECS[0].name)
        for engine in engines:
            engine.disconnect()

    with one_warning("off from step 2 on.*a Recorder serves one compression"):
        run_ranks(1, worker)


# -- what is plainly wrong is said before training begins ------------------------------------------


@pytest.mark.parametrize("path", [5, b"run.jsonl", "", "a\0b", ["run.jsonl"]])
def test_a_path_that_is_none(path: Any) -> None:
    with pytest.raises(ConfigError, match=r"path must be .*, got "):
        Recorder(path)


def test_a_writer_that_is_none() -> None:
    with pytest.raises(ConfigError, match="tensorboard must have an add_scalar, got 'logs'"):
        Recorder(tensorboard="logs")  # type: ignore[arg-type]

"""`hvd-sparse tuned`, with real workers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import pytest
import torch

from hvd_sparse import Compression
from hvd_sparse.cli.main import FAILED, main
from hvd_sparse.cli.tuned import SETTINGS
from hvd_sparse.cores import MOST_CORES, VARIABLE, own_cores
from tests.launch import horovodrun

NAMES = [name for settings in SETTINGS.values() for name in settings]


def train(path: str) -> None:
    model = torch.nn.Linear(64, 64)
    compression = Compression.topk(model.named_parameters(), density=0.1)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), 0.1), model.named_parameters(), compression
    )
    model(torch.ones(1, 64)).sum().backward()
    optimizer.step()
    threads = [sorted(os.sched_getaffinity(int(each))) for each in os.listdir("/proc/self/task")]
    told = {name: os.environ.get(name) for name in NAMES}
    Path(f"{path}.{hvd.rank()}").write_text(json.dumps([threads, told]))
    sys.exit(3 * hvd.rank())


@pytest.mark.launches
@pytest.mark.parametrize("binds", [True, False])
def test_a_job_is_started_with_what_is_quicker(tmp_path: Path, binds: bool) -> None:
    cores = sorted(os.sched_getaffinity(0))[:2]
    done = horovodrun(
        *(2, train, tmp_path / "told"),
        prefix=[
            *(sys.executable, "-m", "hvd_sparse", "tuned", *["--no-binding"] * (not binds)),
            *("taskset", "-c", ",".join(map(str, cores))),
        ],
        env={"HOROVOD_CYCLE_TIME": "5"},
        check=False,
    )
    assert done.returncode != 0  # as rank 1 ended
    assert f"hvd-sparse tuned: sets MALLOC_MMAP_THRESHOLD_={1 << 32}" in done.stderr
    for rank in range(2):
        threads, told = json.loads((tmp_path / f"told.{rank}").read_text())
        mine = sorted(own_cores(rank, 2, cores)) if binds else cores
        assert len(threads) > 3
        assert threads == [mine or cores] * len(threads)
        assert told["HOROVOD_CYCLE_TIME"] == "5"
        assert told["MALLOC_TRIM_THRESHOLD_"] == str(1 << 34)
        assert told["HVD_SPARSE_BIND"] == ("1" if binds else None)


def test_a_job_is_started_though_nobody_reads_what_is_set() -> None:
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "hvd_sparse", "tuned", "sh", "-c", "exit 7"]
    assert subprocess.run(command, stderr=write, check=False, timeout=60).returncode == 7
    os.close(write)


@pytest.mark.parametrize("is_bound", [False, True])
def test_what_a_launcher_has_bound_stays(is_bound: bool) -> None:
    """As by Slurm: the cores are this worker's own, and are not shared again."""
    cores = os.sched_getaffinity(0)
    if len(cores) < 2:
        pytest.skip("one core")
    two = set(sorted(cores)[:2])
    code = (
        f"import os; from hvd_sparse.cores import bind; os.sched_setaffinity(0, {two}); "
        "bind(1, 2); print(sorted(os.sched_getaffinity(0))); "
        "bind(0, 1); print(sorted(os.sched_getaffinity(0)))"
    )
    try:
        os.sched_setaffinity(0, {min(two)} if is_bound else two)
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, VARIABLE: "1"},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            timeout=60,
        )
    finally:
        os.sched_setaffinity(0, cores)
    assert done.stdout.split("\n")[:2] == [str(sorted(two)[not is_bound :]), str(sorted(two))]


@pytest.mark.parametrize(
    ("local_size", "cores", "mine"),
    [(1, 4, []), (2, 4, [2, 3]), (2, 2 * MOST_CORES + 1, [4, 5, 6, 7]), (2, 16, []), (4, 2, [])],
)
def test_cores_are_shared_where_workers_fill_a_host(
    local_size: int, cores: int, mine: list[int]
) -> None:
    assert sorted(own_cores(1 % local_size, local_size, range(cores))) == mine


@pytest.mark.parametrize(
    ("job", "told"),
    [
        *(([], "got none"), (["no-such-launcher"], "no command 'no-such-launcher'")),
        *((["--"], "got none"), (["--", "no-such-launcher"], "no command 'no-such-launcher'")),
    ],
)
def test_what_starts_no_job_is_one_line(job: list[str], told: str, capsys: Any) -> None:
    assert main(["tuned", *job]) == FAILED
    assert told in capsys.readouterr().err

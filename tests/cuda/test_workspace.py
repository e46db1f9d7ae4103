"""What operations on a device share, and how seldom they wait: counted, without a device."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch

from hvd_sparse.methods import METHODS
from hvd_sparse.ops import Accumulation
from hvd_sparse.ops.cuda import Argument, CudaOps, _workspace
from hvd_sparse.ops.cuda import launch_selection as selection
from hvd_sparse.ops.cuda._workspace import MOST_TABLES, TILE, Workspace
from tests.cuda.pretended import CUDA, Present, Pretended
from tests.cuda.shim_launcher import Shim

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def memory_together(memory_apart: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_workspace, "BLOCK_WORDS", 1 << 17)


def gradients(*numels: int) -> list[torch.Tensor]:
    return [torch.zeros(numel, dtype=torch.float16) for numel in numels]


def test_a_table_says_where_every_segment_is() -> None:
    parts = gradients(5, 0, TILE + 1, 7)
    table, rows, tiles = Workspace().segments(parts, TILE + 13, CPU)
    kept = [parts[0], parts[2], parts[3]]
    assert (rows, tiles) == (3, 4)
    assert [id(tensor) for tensor in table.tensors] == [id(tensor) for tensor in kept]
    first, second, third = (part.data_ptr() for part in kept)
    assert table.rows.tolist() == [
        [first, 0, 5, 0, 1],
        [second, 5, TILE + 1, 1, 1],
        [third, TILE + 6, 7, 3, 1],
    ]
    table, rows, tiles = Workspace().segments([], TILE + 13, CPU)
    assert (table.rows.tolist(), rows, tiles) == ([[0, 0, TILE + 13, 0, 3]], 1, 2)


def test_tables_are_kept_as_long_as_gradients_stay() -> None:
    workspace, parts = Workspace(), gradients(5, 6)
    for _ in range(3):
        workspace.segments(parts, 11, CPU)
    assert workspace.tables == 1
    workspace.segments([parts[1], parts[0]], 11, CPU)  # other places
    workspace.segments([parts[0].bfloat16(), parts[1]], 11, CPU)  # another type
    workspace.segments([parts[0][:4], parts[1]], 10, CPU)  # another length
    workspace.segments([], 11, CPU)
    workspace.segments([], 10, CPU)
    assert workspace.tables == 6


def test_a_table_does_not_keep_gradients_nor_do_tables_pile_up() -> None:
    workspace = Workspace()
    [gradient] = gradients(5)
    gone = weakref.ref(gradient)
    workspace.segments([gradient], 5, CPU)
    del gradient
    gc.collect()
    assert gone() is None
    for numel in range(1, 2 * MOST_TABLES):
        workspace.segments([], numel, CPU)
    assert len(workspace._tables) == MOST_TABLES


def test_zeroed_words_are_given_once() -> None:
    workspace = Workspace()
    for _ in range(1000):
        words = workspace.zeros(300, CPU)
        assert not words.any()
        words.fill_(-1)
    assert workspace.blocks == 3


class Counting:
    """Counts launches, by kernel."""

    def __init__(self, shim: Shim) -> None:
        self._launcher = shim.launcher(0)
        self.launched: list[str] = []

    def launch(self, kernel: str, blocks: int, *arguments: Argument) -> None:
        self.launched.append(kernel)
        self._launcher.launch(kernel, blocks, *arguments)


@pytest.mark.slow  # it compiles every kernel
def test_an_operation_waits_once(sanitized: Shim, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "LEAST_SAMPLE", 1 << 9)
    counting = Counting(sanitized)
    ops, residual = CudaOps(counting), torch.randn(9000)
    workspace = ops._workspace
    accumulation = Accumulation(residual, list(torch.randn(9000).split(100)))
    calls = {
        "select": lambda: ops.accumulate_select(accumulation, 2.0),
        "topk": lambda: ops.accumulate_topk(accumulation, 90),
        "hash": lambda: ops.hash_select(accumulation, 2.0, 512, 1, 12345),
        "group topk": lambda: ops.accumulate_group_topk(accumulation, 5),
        "sample": lambda: ops.sample_accumulator(accumulation, 100, 8, 7),
    }
    counts = {}
    for name, call in calls.items():
        before = workspace.reads, len(counting.launched)
        call()
        counts[name] = (workspace.reads - before[0], len(counting.launched) - before[1])
    assert counts == {
        "select": (1, 2),
        "topk": (1, 10),
        "hash": (1, 3),
        "group topk": (1, 1),
        "sample": (0, 1),
    }
    assert (workspace.tables, workspace.blocks) == (1, 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "most"),
    [("topk", 1), ("oktopk", 2), ("dgc", 3), ("dragonn", 3), ("gaussiank", 3), ("mstopk", 12)],
)
def test_a_selection_waits_for_sizes_only(
    one_device: Callable[[], Pretended | Present], name: str, most: int
) -> None:
    """Of a step in which every count is near enough, or is put right."""
    numel, k = 40_000, 400
    method = METHODS[name](density=k / numel).make()
    random = torch.Generator().manual_seed(1)
    with one_device() as device:
        selector, memory = method.selector(), method.memory.make(numel, CUDA, 2)
        for _ in range(3):
            gradient = torch.randn(numel, generator=random).pin_memory()
            gradient = gradient.to(CUDA, non_blocking=True)
            device.counts.clear()
            taken = selector.select(memory.accumulate([gradient], k), k)
            memory.give_back(taken, taken.slice(0, 50))
        assert device.counts["waits"] <= most

"""The tests that run kernels on the CPU find mistakes: each of these is caught.

What they cannot find is an order of memory accesses that a CPU never shows: a missing
`__threadfence`, or a plain load where `LoadRelaxed` is needed.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from hvd_sparse.magnitude import key_magnitude
from hvd_sparse.ops import reference
from hvd_sparse.ops.cuda import CudaOps
from hvd_sparse.ops.cuda import launch_selection as selection
from hvd_sparse.ops.cuda.launch_selection import DESCENT_WORDS, DIGITS, KEY
from tests.cuda.shim_launcher import FAMILIES, SANITIZED, TRACED, Mutation, Shim
from tests.ops.cases import assert_same, cut, generator, same_as_reference, stream, vectors

pytestmark = pytest.mark.slow  # together they are: they compile many kernels

BARRIER = "__syncthreads();"
ATTEMPTS = 30
"""Launchers with different seeds, until one of them shows the mistake."""

MUTATIONS = {
    # compact.cuh
    "tiles by block index": Mutation(
        "streams",
        "SHARED(u32, ticket, 1);",
        "ticket[0] = static_cast<u32>(atomicAdd(&header->ticket, u64{1}));",
        "ticket[0] = blockIdx.x;",
    ),
    "tickets without a barrier": Mutation("streams", "header->ticket, u64{1}));", BARRIER, ""),
    "no barrier before the scan": Mutation(
        "accumulate", "counts[round * kWarps + WarpInBlock()] = in_warp;", BARRIER, ""
    ),
    "no barrier after the scan": Mutation(
        "accumulate", "if (Lane() == kLanes - 1) used[0] = use(sum);", BARRIER, ""
    ),
    "scan that skips a neighbour": Mutation(
        "accumulate", "const u32 other = __shfl_up_sync", "Lane() >= by", "Lane() > by"
    ),
    "inclusive scan": Mutation("accumulate", "counts[Lane()] = ", "sum - own", "sum"),
    "look-back that trusts its own count": Mutation(
        "groups", "StoreRelaxed(&status[tile], (", "tile == 0", "true"
    ),
    "look-back that leaves out the last": Mutation(
        "groups", "u64 part = ", "Lane() <= nearest", "Lane() < nearest"
    ),
    "look-back that counts one twice": Mutation(
        "groups", "if (sums != 0) break;", "last -= kLanes;", "last -= kLanes - 1;"
    ),
    "look-back without a barrier": Mutation(
        "groups", "if (tile + 1 == gridDim.x) header->total = sum + own;", BARRIER, ""
    ),
    "one entry more than there is room": Mutation(
        "accumulate", "const u64 at = ", "at + count > capacity", "at > capacity"
    ),
    "claims without atomics": Mutation(
        "accumulate",
        "const u64 at = ",
        "atomicAdd(&header->total, u64{count})",
        "NonAtomicAdd(&header->total, u64{count})",
    ),
    "claims without a barrier": Mutation("hashing", "place[0] = ClaimRoom(", BARRIER, ""),
    "less was written than there is": Mutation(
        "accumulate",
        "if (at + count > capacity) {",
        "header->written = at;",
        "header->written = 0;",
    ),
    "taken twice": Mutation(
        "accumulate",
        "FindTile(segments, segment_count, blockIdx.x);",
        "if (IsTaken(header, launch)) return;",
        ";",
    ),
    # common.cuh
    "warp sum that skips a neighbour": Mutation(
        "groups", "u32 WarpSum(u32 x) {", "by /= 2", "by /= 4"
    ),
    # gradients.cuh, accumulate.cuh and accumulate.cu
    "segment off by one": Mutation(
        "accumulate",
        "number) {\n  i32 low",
        "segments[middle].*first <= number",
        "segments[middle].*first < number",
    ),
    "load past the end": Mutation(
        "accumulate", "void LoadQuad(", "i < left ? from[i] : 0.0f", "from[i]"
    ),
    "wide load anywhere": Mutation(
        "accumulate", "void LoadQuad(", "left == kQuad && IsAligned(from, 16)", "left == kQuad"
    ),
    "store past the end": Mutation("accumulate", "void StoreQuad(", "i < left", "true"),
    "spoiled residual": Mutation(
        "accumulate", "sums.sum[round][i] = 0.0f;", "Kept(before[at])", "sums.sum[round][i]"
    ),
    "wide tile that is cut": Mutation("accumulate", "bool IsWide(", "tile.numel == kTile", "true"),
    "wide tile that is not aligned": Mutation(
        "accumulate",
        "bool IsWide(",
        "IsAligned(tile.gradient, kQuad * ItemBytes(tile.dtype))",
        "true",
    ),
    "quads of one round": Mutation(
        "accumulate", "uint2 bits[kRounds];", "PlaceOf(round, 0)", "PlaceOf(0, 0)"
    ),
    "gradients of one round": Mutation(
        "accumulate",
        "const u8* const from = tile.gradient + ",
        "PlaceOf(round, 0)",
        "PlaceOf(0, 0)",
    ),
    "threshold that is too high": Mutation(
        "accumulate", "[=](u32 key, i64) { return ", "key >= least", "key > least"
    ),
    "threshold that is too high in a partition": Mutation(
        "accumulate", "return key >= kNonFiniteKey || (", "key >= least", "key > least"
    ),
    # topk.cu
    "no barrier after the bins are cleared": Mutation(
        "topk", "kThreads) counts[bin] = 0;", BARRIER, ""
    ),
    "bins without atomics": Mutation(
        "topk",
        "(peers & LanesBelow()) == 0) {",
        "atomicAdd(&counts[bin], static_cast<u32>(__popc(peers)));",
        "counts[bin] += static_cast<u32>(__popc(peers));",
    ),
    "no barrier after counting": Mutation(
        "topk", "atomicAdd(&counts[bin], static_cast<u32>(__popc(peers)));", BARRIER, ""
    ),
    "last block without atomics": Mutation(
        "topk",
        "is_last[0] =",
        "atomicAdd(&descent->finished[digit], 1u) + 1",
        "++descent->finished[digit]",
    ),
    "no barrier among the warps' sums": Mutation(
        "topk", "if (Lane() == 0) of_warp[WarpInBlock()] = from;", BARRIER, ""
    ),
    "one tie too many": Mutation(
        "topk",
        "if (is_above || (is_tie && ",
        "ties_before < ties_wanted",
        "ties_before <= ties_wanted",
    ),
    "bin off by one": Mutation(
        "topk",
        "u32 bin = kBinsOfThread - 1;",
        "above + counts[each] >= wanted",
        "above + counts[each] > wanted",
    ),
    # groups.cu
    "no barrier after a group's bins are cleared": Mutation(
        "groups", "counts[threadIdx.x] = 0;", BARRIER, ""
    ),
    "a group's bins without atomics": Mutation(
        "groups",
        "(peers & LanesBelow()) == 0) {",
        "atomicAdd(&counts[bin], static_cast<u32>(__popc(peers)));",
        "counts[bin] += static_cast<u32>(__popc(peers));",
    ),
    "no barrier after the digit is found": Mutation(
        "groups", "found[1] = wanted - above;", BARRIER, ""
    ),
    "digit off by one": Mutation(
        "groups", "if (above < wanted && ", "wanted <= above + own", "wanted < above + own"
    ),
    "a group's last tie": Mutation(
        "groups",
        "const bool is_taken = ",
        "ties_rank < ties_wanted",
        "ties_rank + 1 < ties_wanted",
    ),
    "zeros taken": Mutation("groups", "const u32 ties_wanted = ", "kth.key == 0", "false"),
    "a warp's last tie": Mutation(
        "groups", "u32 before_it = rank[row];", "before_it++ >= kth.ties", "before_it++ > kth.ties"
    ),
    "a warp's key bit by bit": Mutation(
        "groups", "const u32 tried = key | bit;", "other >= tried", "other > tried"
    ),
    "a warp's ties counted as one": Mutation(
        "groups", "return other == key; });", "k -= found;", "k -= 1;"
    ),
    "groups of a block without order": Mutation(
        "groups",
        "SumBefore(header, ticket, in_block) + ",
        "__shfl_sync(kAllLanes, of_warps, 0)",
        "0u",
    ),
    "rows of a group without order": Mutation(
        "groups", "rank[row] = before + (", "static_cast<u32>((upto - own) >> (row * 8))", "0u"
    ),
    "quads of one row": Mutation(
        "groups", "const i64 at = begin + PlaceOf(row);", "before + at", "before + begin"
    ),
    "segments left behind": Mutation(
        "groups",
        "f32 At(i64 at, f32& u) {",
        "at >= segment->begin + segment->numel",
        "at > segment->begin + segment->numel",
    ),
    # streams.cu
    "bits without atomics": Mutation(
        "streams",
        "KERNEL mark_indices(",
        "atomicOr(&bitmap[index / 32], 1u << (index % 32));",
        "bitmap[index / 32] |= 1u << (index % 32);",
    ),
    "no barrier among the words' sums": Mutation(
        "streams", "if (Lane() == kLanes - 1) of_warp[WarpInBlock()] = upto;", BARRIER, ""
    ),
    "unchecked index": Mutation(
        "streams",
        "bool IsIndex(i32 index, i64 numel, u64* fault) {",
        "index >= 0 && index < numel",
        "index >= 0",
    ),
    "all tiles in one place": Mutation(
        "streams", "places[threadIdx.x] = ", "static_cast<u32>(place)", "0u"
    ),
    "groups without atomics": Mutation(
        "accumulate",
        "StatusOf(header)[blockIdx.x] = kClaimed",
        "atomicAdd(&GroupsOf(header, gridDim.x)[blockIdx.x / kOrderedTiles], u64{count});",
        "NonAtomicAdd(&GroupsOf(header, gridDim.x)[blockIdx.x / kOrderedTiles], u64{count});",
    ),
    "groups that are not counted": Mutation(
        "streams", "const u64 place = ", "sums << 32", "u64{0}"
    ),
    "vector without its tail": Mutation(
        "streams", "const u32 wide_bytes = ", "at < bytes", "at + 2 < bytes"
    ),
    "tiles that are not there": Mutation(
        "streams", "const i64 own_tile = ", "own_tile < tiles", "true"
    ),
    "search that passes its key": Mutation(
        "streams", "i64 FirstFrom(", "indices[at] < key", "indices[at] <= key"
    ),
    "vector that is not cleared in time": Mutation(
        "streams", "quads[quad] = uint4{0, 0, 0, 0};", BARRIER, ""
    ),
    "vector that is not there in time": Mutation("streams", "halfs[index - begin] = ", BARRIER, ""),
    "search that ends early": Mutation("streams", "bool Contains(", "low < high", "low + 1 < high"),
    # hashing.cu
    "slots without atomics": Mutation(
        "hashing",
        "void Claim(",
        "atomicMax(&bucket[slot], rank)",
        "NonAtomicMax(&bucket[slot], rank)",
    ),
    "loser forgotten": Mutation(
        "hashing", "const u64 found = ", "found < rank ? found : rank", "kEmpty"
    ),
    "magnitudes not compared": Mutation(
        "hashing", "slots_per_bucket,\n          RankOf(", "sums.KeyAt(item)", "1u"
    ),
    "spoiled residual of a hit": Mutation("hashing", "const f32 old = u;", "Kept(v)", "sum"),
    "no barrier before the marks": Mutation("hashing", "own_marks[threadIdx.x] = 0;", BARRIER, ""),
    "no barrier after the marks": Mutation(
        "hashing", "sums.Store(residual, momentum, tile, is_wide);", BARRIER, ""
    ),
    "marks without atomics": Mutation(
        "hashing",
        "const u32 place = PlaceOf(item / kQuad, item % kQuad);",
        "atomicOr(&marks[of * kWordsOfTile + place / kBits], 1u << (place % kBits));",
        "marks[of * kWordsOfTile + place / kBits] |= 1u << (place % kBits);",
    ),
}


@pytest.fixture(autouse=True)
def inputs_of_its_own() -> Iterator[None]:
    """A mistaken kernel may write to what it should only read."""
    yield
    vectors.cache_clear()
    stream.cache_clear()


def select(ops: CudaOps) -> None:
    for name, residual, gradient in vectors(9001)[::4]:
        same_as_reference(ops, "accumulate_select", residual, cut(gradient, 4), 1.5, what=name)
    # Many small tiles, of which many blocks are resident at once.
    residual, gradient = torch.randn(2, 700, generator=generator())
    pieces = [*gradient[:698].split(6), gradient[698:]]
    same_as_reference(ops, "accumulate_select", residual, pieces, 1.0)
    same_as_reference(ops, "accumulate_select", residual[1:], [gradient[1:]], 1.0)
    ties = torch.ones(5000)
    same_as_reference(ops, "accumulate_select", ties, [], 1.0)
    same_as_reference(ops, "accumulate_select", ties, [], 1.0, 100, 3000)
    # One whole tile: in its place, and one element beside it.
    residual, gradient = torch.randn(2, 4097, generator=generator())
    whole, half = gradient[:4096].clone(), gradient[:4096].bfloat16()
    same_as_reference(ops, "accumulate_select", residual[:4096].clone(), [half], 1.0)
    same_as_reference(ops, "accumulate_select", residual[:4096].clone(), [whole], 1.0)
    same_as_reference(ops, "accumulate_select", residual[1:], [gradient[1:]], 1.0)


def topk(ops: CudaOps) -> None:
    for _, residual, gradient in vectors(9001)[:5:4]:
        same_as_reference(ops, "accumulate_topk", residual, [gradient], 300)
    # Keys that follow each other, so that each rank ends its bin, and few of them: one warp counts
    # while the others may still be clearing bins.
    distinct = (torch.arange(40, dtype=torch.int32) + 0x3F800000).view(torch.float32)
    for k in range(1, 41):
        assert_same(ops.kth_magnitude(distinct, k), reference.kth_magnitude(distinct, k))
    # More blocks than tiles: which is the last one, is the question.
    for k in range(1, 13):
        descent = torch.zeros(DESCENT_WORDS, dtype=torch.int64)
        count = (np.int64(distinct.numel()), None, np.uint64(k))
        for digit in range(DIGITS):
            ops._launch("count_digits", 16, distinct, *count, np.uint32(digit), descent)
        found = key_magnitude(int(descent[KEY]))
        assert_same(found, reference.kth_magnitude(distinct, k))


def merge(ops: CudaOps) -> None:
    # Many tiles, whose claims several blocks put in order.
    residual, gradient = torch.randn(2, 700, generator=generator())
    for threshold in (1.0, 0.0):  # and where all room is taken
        same_as_reference(ops, "accumulate_select", residual, [*gradient.split(2)], threshold)
    streams = [stream(40_000, 3000, seed) for seed in range(3)]
    assert_same(ops.merge_sum(streams, 40_000), reference.merge_sum(streams, 40_000))
    dense, expected = torch.full((2, 40_001), 3.0)
    for step in (64, 8000):
        indices = torch.arange(0, 40_001, step, dtype=torch.int32)
        for decoded, each in ((dense, ops), (expected, reference)):
            each.decode(decoded, indices, 1.0 / (1 + indices))
        assert_same(dense, expected)
    kept = ops.difference(*streams[0], streams[1][0])
    assert_same(kept, reference.difference(*streams[0], streams[1][0]))
    ops.scatter_add(torch.zeros(4), *stream(9, 9, 0))
    with pytest.raises(ValueError, match=r"in \[0, 4\), got [4-8]: "):
        ops.kth_magnitude(torch.ones(4), 1)


def hashing(ops: CudaOps) -> None:
    _, residual, gradient = vectors(5000)[8]  # not finite everywhere
    for slots, slots_per_bucket in ((64, 1), (64, 8)):
        same_as_reference(
            ops, "hash_select", residual, [gradient], 1.0, slots, slots_per_bucket, 12345
        )


def groups(ops: CudaOps) -> None:
    for _, residual, gradient in vectors(1000)[:5:4]:
        same_as_reference(ops, "accumulate_group_topk", residual, cut(gradient, 4), 20, 300)
        same_as_reference(ops, "accumulate_group_topk", residual, [gradient], 5, 300)
    for _, residual, gradient in vectors(3001)[:5:4]:
        same_as_reference(ops, "accumulate_group_topk", residual, cut(gradient, 4), 540, 1100)
    pairs = torch.arange(1000.0) % 97
    same_as_reference(ops, "accumulate_group_topk", pairs, [], 5, 250)
    # Many blocks that look back.
    same_as_reference(ops, "accumulate_group_topk", pairs, [], 1, 1)
    zeros = torch.zeros(1300)
    for group_numel in (300, 1100):
        same_as_reference(ops, "accumulate_group_topk", zeros, [], 20, group_numel)


EXERCISES: dict[str, Callable[[CudaOps], None]] = {
    "accumulate": select,
    "groups": groups,
    "hashing": hashing,
    "streams": merge,
    "topk": topk,
}
ASAN_FINDS = (
    "load past the end",
    "wide load anywhere",
    "wide tile that is cut",
    "wide tile that is not aligned",
    "store past the end",
    "one entry more than there is room",
)


@pytest.fixture(scope="module")
def shims() -> dict[bool, Shim]:
    """With all mutations built in: one whose fibers race, and one under the sanitizers."""
    mutations = tuple(MUTATIONS.values())
    return {
        False: Shim(FAMILIES, TRACED, mutations),
        True: Shim(("accumulate", "streams", "topk"), SANITIZED, mutations),
    }


def run(shim: Shim, family: str, mutation: int | None, seed: int) -> None:
    launcher = shim.launcher(seed, mutation)
    try:
        EXERCISES[family](CudaOps(launcher))
    finally:
        launcher.close()


@pytest.fixture(autouse=True)
def little_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "LEAST_CAPACITY", 1000)
    monkeypatch.setattr(selection, "FEW_GROUPS", 0)


@pytest.mark.parametrize(
    ("sanitized", "family"),
    [*((False, family) for family in FAMILIES), (True, "accumulate"), (True, "streams")],
)
def test_without_mutation(shims: dict[bool, Shim], family: str, sanitized: bool) -> None:
    for seed in range(2):
        run(shims[sanitized], family, None, seed)


@pytest.mark.parametrize("name", MUTATIONS)
def test_is_caught(shims: dict[bool, Shim], name: str) -> None:
    number, family = list(MUTATIONS).index(name), MUTATIONS[name].family
    for seed in range(ATTEMPTS):
        try:
            run(shims[name in ASAN_FINDS], family, number, seed)
        except (AssertionError, IndexError, RuntimeError, struct.error, pytest.fail.Exception):
            return
    pytest.fail(f"nothing was wrong in {ATTEMPTS} runs")

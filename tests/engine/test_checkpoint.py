"""Checkpoints of ranks in threads: whole or not at all, at any world size, with nothing lost."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

import hvd_sparse.engine.checkpoint as module
from hvd_sparse.engine import Engine
from hvd_sparse.engine.checkpoint import Loaded, load_checkpoint, save_checkpoint
from hvd_sparse.engine.state import EngineState
from hvd_sparse.errors import CheckpointError, ConfigError, PeerLostError
from hvd_sparse.transports import Transport, run_ranks
from tests.engine.checkpoint_kills import gather_over
from tests.engine.test_state import SHAPES, engine_of, train_step
from tests.launch import TESTS, launch_environment

Action = Callable[[Engine, Transport], Any]


def save(engine: Engine, transport: Transport, path: Path) -> None:
    gather = gather_over(transport)
    save_checkpoint(path, engine.state_dict, transport.rank, transport.world_size, gather)


def load(transport: Transport, path: Path, missing: str = "refuse", shapes: Any = SHAPES) -> Loaded:
    gather = gather_over(transport)
    return load_checkpoint(path, transport.rank, transport.world_size, gather, missing, shapes)


def on_ranks(world_size: int, action: Action, **arguments: Any) -> list[Any]:
    def worker(transport: Transport) -> Any:
        engine = engine_of(transport, **arguments)
        result = action(engine, transport)
        engine.disconnect()
        return result

    return run_ranks(world_size, worker, timeout_s=60.0)


def train_and_save(path: Path, steps: int = 3) -> Action:
    def action(engine: Engine, transport: Transport) -> dict[str, Any]:
        for step in range(steps):
            train_step(engine, transport.rank, step)
        save(engine, transport, path)
        return engine.state_dict()

    return action


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint of three ranks."""
    on_ranks(3, train_and_save(tmp_path / "saved"))
    return tmp_path / "saved"


def mass(states: list[dict[str, Any]], kind: str) -> dict[str, Tensor]:
    return {
        name: torch.stack([s[kind][name] for s in states if name in s[kind]]).double().sum(0)
        for name in SHAPES
    }


@pytest.mark.parametrize("kind", ["local", "global"])
def test_the_sum_over_the_ranks_survives_every_change_of_the_world(
    kind: str, tmp_path: Path
) -> None:
    """3 ranks, then 2, 4 and 3: residuals of whole numbers, and momenta by 0.5, are exact.

    A share of global momentum is a third of a whole number, so that only its sum can be compared.
    """
    exactly = 0.0 if kind == "local" else 1e-6
    states = on_ranks(3, train_and_save(tmp_path), momentum_kind=kind)
    for world_size in (2, 4, 3):
        before = states

        def go_on(engine: Engine, transport: Transport) -> list[dict[str, Any]]:
            loaded = load(transport, tmp_path)
            engine.load_state_dict(loaded.state, strict=False)
            came = engine.state_dict()
            train_step(engine, transport.rank, 7)
            save(engine, transport, tmp_path)
            return [came, engine.state_dict()]

        ranks = on_ranks(world_size, go_on, momentum_kind=kind)
        came, states = map(list, zip(*ranks, strict=True))
        for part in ("residual", "momentum"):
            old, new = mass(before, part), mass(came, part)
            assert all(old[name].any() for name in SHAPES)
            torch.testing.assert_close(old, new, rtol=exactly, atol=exactly)
        assert {state["step"] for state in came} == {before[0]["step"]}
        assert {state["step"] for state in states} == {before[0]["step"] + 1}


def test_the_same_world_goes_on_bit_for_bit(tmp_path: Path) -> None:
    def action(engine: Engine, transport: Transport) -> None:
        train_and_save(tmp_path)(engine, transport)
        for step in range(3, 9):
            train_step(engine, transport.rank, step)
        straight = engine.state_dict()
        engine.load_state_dict(load(transport, tmp_path).state, strict=False)
        for step in range(3, 9):
            train_step(engine, transport.rank, step)
        again = engine.state_dict()
        for kind in ("residual", "momentum"):
            assert all(torch.equal(straight[kind][n], again[kind][n]) for n in SHAPES)

    on_ranks(3, action)


def test_a_new_checkpoint_takes_the_place_of_the_old_one(folder: Path) -> None:
    (folder / ".0123456789abcdef.pt").write_bytes(b"what a killed process left")
    on_ranks(2, train_and_save(folder, steps=5))
    assert json.loads((folder / "manifest.json").read_text())["manifest"]["step"] == 5
    names = sorted(path.name for path in folder.iterdir())
    assert len(names) == 3, names
    assert all("of-2" in name or name == "manifest.json" for name in names)


@pytest.mark.parametrize("fails", ["_write_state", "_write_manifest"])
def test_until_all_have_written_the_old_one_stands(
    folder: Path, fails: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that is full on one rank: every rank is told, nothing is left, the old one loads."""
    names = sorted(path.name for path in folder.iterdir())
    write = getattr(module, fails)

    def full(path: Path, *arguments: Any) -> Any:
        if fails == "_write_manifest" or "rank-1" in path.name:
            raise OSError(28, "No space left on device")
        return write(path, *arguments)

    monkeypatch.setattr(module, fails, full)

    def action(engine: Engine, transport: Transport) -> None:
        train_step(engine, transport.rank)
        with pytest.raises(CheckpointError, match=r"save .*rank \d: OSError.*No space left"):
            save(engine, transport, folder)
        assert load(transport, folder).state["step"] == 3

    on_ranks(3, action)
    assert sorted(path.name for path in folder.iterdir()) == names


def test_a_rank_that_loses_the_others_keeps_its_file(folder: Path) -> None:
    """Rank 0 may be writing the manifest that names it."""
    left = [threading.Event() for _ in range(3)]

    def action(engine: Engine, transport: Transport) -> None:
        train_step(engine, transport.rank)
        rank, gather, calls = transport.rank, gather_over(transport), 0

        def losing(mine: Any) -> list[Any]:
            nonlocal calls
            calls += 1
            if calls <= 2:
                return gather(mine)
            if rank > 0:
                raise PeerLostError("a peer is gone")
            return [mine] * 3

        def manifest_later(path: Path, manifest: Any) -> Any:
            assert all(each.wait(30) for each in left[1:])
            return write(path, manifest)

        with pytest.MonkeyPatch.context() as patch:
            if rank == 0:
                patch.setattr(module, "_write_manifest", manifest_later)
            try:
                save_checkpoint(folder, engine.state_dict, rank, 3, losing)
            except PeerLostError:
                left[rank].set()

    write = module._write_manifest
    on_ranks(3, action)
    states = on_ranks(3, lambda engine, transport: load(transport, folder).state)
    assert [state["step"] for state in states] == [1, 1, 1]


@pytest.mark.slow
def test_a_process_that_is_killed_while_it_saves_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    """At each of its operations on files; what it leaves, the next checkpoint removes."""
    done = subprocess.run(
        [sys.executable, str(TESTS / "engine/checkpoint_kills.py"), str(tmp_path / "saved")],
        env=launch_environment(),
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    killed = re.search(r"KILLED (\d+)", done.stdout)
    assert killed, done.stdout + done.stderr
    assert int(killed[1]) >= 12  # two ranks' files and the manifest: opened, renamed, removed


HOSTILE: dict[str, tuple[Callable[[Path], object], str]] = {
    "a file": (lambda path: path.write_text("precious"), "FileExistsError"),
    "below a file": (lambda path: path.parent.write_text("precious"), "NotADirectoryError"),
    "a link to nothing": (lambda path: path.symlink_to(path / "none"), "Error"),
    "a folder for a manifest": (
        lambda path: (path / "manifest.json").mkdir(parents=True),
        "IsADirectoryError",
    ),
}


@pytest.mark.parametrize("hostile", HOSTILE)
def test_a_path_that_cannot_be_written_is_refused_on_every_rank(
    tmp_path: Path, hostile: str
) -> None:
    path = tmp_path / "parent" / "saved"
    if hostile != "below a file":
        path.parent.mkdir()
    make, message = HOSTILE[hostile]
    make(path)

    def action(engine: Engine, transport: Transport) -> None:
        train_step(engine, transport.rank)
        with pytest.raises(CheckpointError, match=f"save .*rank 0[:,] .*{message}"):
            save(engine, transport, path)
        train_step(engine, transport.rank, 1)

    on_ranks(2, action)
    assert not list(tmp_path.rglob("*.pt"))
    if "file" in hostile:
        assert "precious" in [p.read_text() for p in tmp_path.rglob("*") if p.is_file()]


@pytest.mark.parametrize("damage", ["half", "no text"])
def test_a_damaged_manifest_is_replaced(folder: Path, damage: str) -> None:
    MANIFEST_DAMAGE[damage][0](folder)
    on_ranks(2, train_and_save(folder, steps=5))
    states = on_ranks(2, lambda engine, transport: load(transport, folder).state)
    assert [state["step"] for state in states] == [5, 5]


def test_what_cannot_be_removed_is_only_warned_of(folder: Path) -> None:
    """The folder's name is a file's of an earlier checkpoint; removing it fails on every rank."""
    kept = folder / "step-1-0123456789abcdef-rank-0-of-3.pt"
    kept.mkdir()
    with pytest.warns(UserWarning, match="cannot be removed: .*rank-0-of-3.pt"):
        on_ranks(2, train_and_save(folder, steps=5))
    assert sorted(p.name for p in folder.iterdir() if "of-3" in p.name) == [kept.name]
    states = on_ranks(2, lambda engine, transport: load(transport, folder).state)
    assert [state["step"] for state in states] == [5, 5]


@pytest.mark.parametrize("missing", ["refuse", "drop"])
def test_a_checkpoint_that_is_replaced_while_it_is_read(folder: Path, missing: str) -> None:
    """Another job saves after this one has read the manifest: the new one is loaded, whole."""

    def action(engine: Engine, transport: Transport) -> EngineState:
        del engine
        gather, calls = gather_over(transport), 0

        def gather_late(mine: Any) -> list[Any]:
            nonlocal calls
            calls += 1
            every = gather(mine)
            if calls == 1 and transport.rank == 0:
                on_ranks(3, train_and_save(folder, steps=5))
            gather(None)
            return every

        loaded = load_checkpoint(folder, transport.rank, 3, gather_late, missing, SHAPES)
        assert not loaded.dropped
        return EngineState.from_dict(loaded.state)

    assert [state.step for state in on_ranks(3, action)] == [5, 5, 5]


def json_or_bytes(data: bytes) -> object:
    try:
        return json.loads(data)
    except ValueError:
        return data


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_a_file_with_any_other_bytes_is_refused_by_name(folder: Path, data: st.DataObject) -> None:
    """Cut, lengthened or with other bytes in any place: of a rank's file, or of the manifest."""
    path = data.draw(st.sampled_from(sorted(folder.iterdir())))
    whole = path.read_bytes()
    place = data.draw(st.integers(0, len(whole) - 1), "place")
    other = data.draw(st.binary(max_size=8), "bytes")
    spoilt = whole[:place] + other + whole[place + data.draw(st.integers(0, 9), "removed") :]
    assume(json_or_bytes(spoilt) != json_or_bytes(whole))  # white space changes no manifest
    path.write_bytes(spoilt)
    try:
        with pytest.raises(CheckpointError, match=f"load {folder}: rank 0: .*{path.name}"):
            load_checkpoint(folder, 0, 1, lambda mine: [mine], "refuse", SHAPES)
    finally:
        path.write_bytes(whole)


def test_ranks_at_different_steps_cannot_save(tmp_path: Path) -> None:
    def action(engine: Engine, transport: Transport) -> None:
        train_step(engine, transport.rank)
        state = {**engine.state_dict(), "step": 1 + transport.rank}
        gather = gather_over(transport)
        with pytest.raises(CheckpointError, match=r"step must be the same.*rank 0 1, rank 1 2"):
            save_checkpoint(tmp_path, lambda: state, transport.rank, 2, gather)

    on_ranks(2, action)
    assert not list(tmp_path.iterdir())


def test_a_rank_that_has_just_joined_knows_no_unit(tmp_path: Path) -> None:
    def action(engine: Engine, transport: Transport) -> None:
        train_step(engine, transport.rank)
        state = {**engine.state_dict(), "unit": None if transport.rank == 0 else 64.0}
        save_checkpoint(tmp_path, lambda: state, transport.rank, 2, gather_over(transport))
        gather = gather_over(transport)
        loaded = load_checkpoint(tmp_path, transport.rank, 2, gather, "refuse", SHAPES)
        assert loaded.state["unit"] == 64.0

    on_ranks(2, action)


def file_of(folder: Path, rank: int) -> Path:
    return next(folder.glob(f"*-rank-{rank}-of-3.pt"))


def without_l1(folder: Path) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())["manifest"]
    del manifest["files"][1]["l1"]
    document = {"manifest": manifest, "sha256": module._checksum(module._canonical(manifest))}
    (folder / "manifest.json").write_text(json.dumps(document))


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 4
    path.write_bytes(content)


def swap(folder: Path) -> None:
    one, other = file_of(folder, 1), file_of(folder, 2)
    content = one.read_bytes()
    shutil.copy(other, one)
    other.write_bytes(content)


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (
        lambda folder: file_of(folder, 1).write_bytes(file_of(folder, 1).read_bytes()[:-9]),
        r"rank 1: ConfigError: step-3-.*rank-1-of-3.pt: must have \d+ bytes, got \d+",
    ),
    "empty": (lambda folder: file_of(folder, 2).write_bytes(b""), "rank 2: .* bytes, got 0"),
    "flipped": (lambda folder: flip(file_of(folder, 0), 999), "rank 0: .*the checksum is another"),
    "swapped": (swap, "rank 1: .*rank-1-of-3.pt: .*; rank 2: .*rank-2-of-3.pt: "),
    "missing": (lambda folder: file_of(folder, 1).unlink(), "rank 1: there is no .*rank-1-of-3.pt"),
}
MANIFEST_DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "no manifest": (
        lambda folder: (folder / "manifest.json").unlink(),
        "there is no .*manifest.json",
    ),
    "no folder": (shutil.rmtree, "there is no "),
    "flipped": (lambda folder: flip(folder / "manifest.json", 200), "manifest"),
    "half": (lambda folder: (folder / "manifest.json").write_bytes(b'{"mani'), "is no manifest"),
    "no text": (lambda folder: (folder / "manifest.json").write_bytes(b"\xff\x00"), "no manifest"),
    "without l1": (without_l1, "files must be one for each rank"),
    "a list": (lambda folder: (folder / "manifest.json").write_text("[]"), "is no manifest"),
    "foreign": (
        lambda folder: (folder / "manifest.json").write_text(
            json.dumps({"manifest": {"format": "x", "version": 1}})
        ),
        r"must be 'hvd_sparse checkpoint' of version 2, got \('x', 1\)",
    ),
}


@pytest.mark.parametrize("missing", ["refuse", "drop"])
@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_files_are_refused_or_counted_on_every_rank(
    folder: Path, damage: str, missing: str
) -> None:
    spoil, message = DAMAGE[damage]
    manifest = json.loads((folder / "manifest.json").read_text())["manifest"]
    spoil(folder)

    def action(engine: Engine, transport: Transport) -> float:
        if missing == "refuse":
            with pytest.raises(CheckpointError, match=f"load .*{message}"):
                load(transport, folder)
            return 0.0
        loaded = load(transport, folder, missing)
        assert bool(loaded.dropped) == (not loaded.state["residual"])
        assert loaded.dropped_l1 in (0.0, manifest["files"][transport.rank]["l1"])
        engine.load_state_dict(loaded.state, strict=False)
        train_step(engine, transport.rank)
        assert engine.state_dict()["step"] == 4
        return loaded.dropped_l1

    assert (sum(on_ranks(3, action)) > 0) == (missing == "drop")


@pytest.mark.parametrize("damage", MANIFEST_DAMAGE)
def test_a_damaged_manifest_is_refused_on_every_rank(folder: Path, damage: str) -> None:
    spoil, message = MANIFEST_DAMAGE[damage]
    spoil(folder)

    def action(engine: Engine, transport: Transport) -> None:
        for missing in ("refuse", "drop"):
            with pytest.raises(CheckpointError, match=f"load .*rank 0, 1: .*{message}"):
                load(transport, folder, missing)

    on_ranks(2, action)


def test_parts_of_two_checkpoints_are_refused(folder: Path, tmp_path: Path) -> None:
    """As on hosts that share no file system, of which one was not reached."""
    other = tmp_path / "other"
    on_ranks(2, train_and_save(other, steps=4))

    def action(engine: Engine, transport: Transport) -> None:
        path = other if transport.rank == 1 else folder
        with pytest.raises(CheckpointError, match="different checkpoints: rank 0 step 3, rank 1 s"):
            load(transport, path)

    on_ranks(2, action)


def test_hosts_that_share_nothing_keep_their_own_ranks_files(tmp_path: Path) -> None:
    def action(engine: Engine, transport: Transport) -> None:
        folder = tmp_path / str(transport.rank)
        train_and_save(folder)(engine, transport)
        assert len(list(folder.iterdir())) == 2
        loaded, now = load(transport, folder), engine.state_dict()
        assert all(torch.equal(loaded.state["residual"][n], now["residual"][n]) for n in SHAPES)

    on_ranks(2, action)


def test_another_model_is_refused_or_counted(folder: Path) -> None:
    def action(engine: Engine, transport: Transport) -> None:
        with pytest.raises(
            CheckpointError, match="rank 0, 1: residual of 'large': there is no such"
        ):
            load(transport, folder, shapes={"small": (257,)})
        loaded = load(transport, folder, "drop", shapes={"small": (257,)})
        assert loaded.state["residual"].keys() == {"small"}
        assert loaded.dropped_l1 > 0
        with pytest.raises(ConfigError, match="missing must be one of refuse, drop; got 'x'"):
            load(transport, folder, "x")

    on_ranks(2, action)


@pytest.mark.parametrize("nonzero", [0, 1, 4_999, 5_000, 10_000])
def test_only_what_is_not_zero_is_stored_where_that_is_smaller(
    tmp_path: Path, nonzero: int
) -> None:
    residual = torch.zeros(100, 100)
    residual.view(-1)[torch.randperm(10_000)[:nonzero]] = torch.randn(nonzero)
    if nonzero:
        residual.view(-1)[residual.view(-1).nonzero()[0]] = -0.0
    state = EngineState(residual={"a": residual, "b": torch.tensor(1.5)}, step=3)

    def alone(mine: Any) -> list[Any]:
        return [mine]

    save_checkpoint(tmp_path, state.as_dict, 0, 1, alone)
    loaded = load_checkpoint(tmp_path, 0, 1, alone).state["residual"]["a"]
    assert torch.equal(loaded.view(torch.int32), residual.view(torch.int32))
    (file,) = tmp_path.glob("*.pt")
    assert file.stat().st_size < 8 * min(nonzero, 5_000) + 5_000


def test_packed_entries_that_do_not_fit_are_refused() -> None:
    for indices in ([2], [-3]):
        stored = {"indices": torch.tensor(indices).int(), "values": torch.ones(1)}
        with pytest.raises(IndexError):
            module._unpacked(stored, (2,))

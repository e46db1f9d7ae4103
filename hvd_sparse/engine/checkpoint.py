"""Checkpoints: the states of all ranks in one folder, written whole or not at all.

The folder holds `manifest.json` and one file per rank, under a name that no other checkpoint has.
The manifest lists the files with their sizes and checksums. It is written last: until then the
folder's earlier checkpoint is valid.

In a world of another size, the residual and momentum of old rank i go to new rank i % P, which adds
them up. So the sum over the ranks stays what it was.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hvd_sparse._version import __version__
from hvd_sparse.checks import check_choice
from hvd_sparse.engine.state import EngineState, l1_of
from hvd_sparse.errors import CheckpointError, ConfigError
from hvd_sparse.files import replacing

FORMAT, VERSION = "hvd_sparse checkpoint", 1
MANIFEST = "manifest.json"
FILE_NAME = re.compile(r"step-\d+-[0-9a-f]{16}-rank-\d+-of-\d+\.pt")
UNFINISHED = re.compile(r"\.[0-9a-f]{16}\.(pt|json)")
"""Files that `files.replacing` leaves behind where the process is killed."""
KEYS = frozenset({"format", "version", "package", "world_size", "step", "unit", "shapes", "files"})

Gather = Callable[[Any], list[Any]]
"""Gives every rank's object to every rank, in the order of the ranks; all ranks call it."""


@dataclass(frozen=True)
class Loaded:
    """One rank's part of a checkpoint, and what it left out: in words, and by its L1 norm."""

    state: dict[str, Any]
    dropped: list[str]
    dropped_l1: float


def save_checkpoint(
    path: str | os.PathLike[str],
    state_of: Callable[[], dict[str, Any]],
    rank: int,
    world_size: int,
    gather: Gather,
) -> None:
    """Write a checkpoint; all ranks call this together.

    The folder is created if necessary; `state_of` returns this rank's state.

    Raises:
        CheckpointError: On every rank, if any of them could not write.
    """
    folder = Path(path)
    token = secrets.token_hex(8)
    mine, error = _tried(lambda: EngineState.from_dict(state_of()))
    state = mine or EngineState()
    shapes = {name: list(tensor.shape) for name, tensor in state.residual.items()}
    summary = {"token": token, "step": state.step, "unit": state.unit, "shapes": shapes}
    ranks = _gathered(gather, summary, error, "save", folder)
    step, token = ranks[0]["step"], ranks[0]["token"]
    _check_alike(ranks, folder)
    state.rank, state.world_size = rank, world_size
    name = f"step-{step}-{token}-rank-{rank}-of-{world_size}.pt"
    try:
        entry, error = _tried(lambda: _write_state(folder / name, state))
        files = _gathered(gather, entry, error, "save", folder)
        manifest = {
            "format": FORMAT,
            "version": VERSION,
            "package": __version__,
            "world_size": world_size,
            "step": step,
            "unit": state.unit,
            "shapes": {name: shape for each in ranks for name, shape in each["shapes"].items()},
            "files": files,
        }
        # Where hosts share no file system, the others have yet to write theirs.
        write = partial(_write_manifest, folder, manifest)
        for writers in ([0], range(world_size)):
            _, error = _tried(write) if rank in writers else (None, "")
            _gathered(gather, None, error, "save", folder)
    except CheckpointError:  # all ranks know of it; by another error rank 0 may still go on
        if not _stands(folder, name):
            (folder / name).unlink(missing_ok=True)
        raise
    _remove_others(folder, {file["name"] for file in files})


def load_checkpoint(
    path: str | os.PathLike[str],
    rank: int,
    world_size: int,
    gather: Gather,
    missing: str = "refuse",
    shapes: Mapping[str, Sequence[int]] | None = None,
) -> Loaded:
    """Read this rank's part of a checkpoint; all ranks call this together.

    `missing` says whether to "refuse" or to "drop" what is damaged, missing or not of this
    checkpoint. `shapes` has the model's parameters, if they are known.

    Raises:
        ConfigError: `missing` is neither.
        CheckpointError: On every rank, if any of them cannot load.
    """
    check_choice("missing", missing, ("refuse", "drop"))
    folder = Path(path)
    manifest, error = _tried(lambda: _read_manifest(folder))
    digest = manifest and _checksum(_canonical(manifest))
    seen = _gathered(gather, (digest, manifest and manifest["step"]), error, "load", folder)
    assert manifest is not None
    if len({each[0] for each in seen}) > 1:
        steps = ", ".join(f"rank {r} step {each[1]}" for r, each in enumerate(seen))
        raise CheckpointError(f"load {folder}: ranks see different checkpoints: {steps}")

    total = EngineState(step=manifest["step"], unit=manifest["unit"])
    faults: list[str] = []
    lost = 0.0
    old_size = manifest["world_size"]
    for old_rank in range(rank, old_size, world_size):
        file = manifest["files"][old_rank]
        state, error = _tried(partial(_read_state, folder, file, manifest))
        if state is None or state.rank != old_rank:
            faults.append(error or f"{file['name']}: rank must be {old_rank}, got {state.rank}")
            lost += file["l1"]
            continue
        total.add(state)
        total.planner = total.planner or state.planner
        if old_size == world_size:
            total.buckets, total.rank, total.world_size = state.buckets, rank, world_size
    strangers = {} if shapes is None else total.strangers(shapes)
    faults += [f"residual of {name!r}: {why}" for name, why in strangers.items()]
    lost += total.drop(strangers)
    state_dict, error = _tried(lambda: EngineState.from_dict(total.as_dict()).as_dict())
    refused = "; ".join(faults) if missing == "refuse" else ""
    _gathered(gather, None, error or refused, "load", folder)
    assert state_dict is not None
    return Loaded(state_dict, faults, lost)


# -- agreement -------------------------------------------------------------------------------------


def _tried(action: Callable[[], Any]) -> tuple[Any, str]:
    """An action's result, or None and its error for the other ranks."""
    try:
        return action(), ""
    except FileNotFoundError as error:
        return None, f"there is no {error.filename}"
    except Exception as error:
        return None, f"{type(error).__name__}: {error}"


def _gathered(gather: Gather, mine: Any, error: str, what: str, folder: Path) -> list[Any]:
    """All ranks' objects.

    Raises:
        CheckpointError: On every rank, if any has an error.
    """
    everyone = gather((mine, error))
    ranks: dict[str, list[str]] = {}
    for rank, (_, told) in enumerate(everyone):
        ranks.setdefault(told, []).append(str(rank))
    wrong = [f"rank {', '.join(those)}: {told}" for told, those in ranks.items() if told]
    if wrong:
        raise CheckpointError(f"{what} {folder}: {'; '.join(wrong)}")
    return [each for each, _ in everyone]


def _check_alike(ranks: Sequence[Mapping[str, Any]], folder: Path) -> None:
    shapes: dict[str, Any] = {}
    for rank, its in enumerate(ranks):
        for key in ("step", "unit"):
            if its[key] != ranks[0][key]:
                raise CheckpointError(
                    f"save {folder}: {key} must be the same on all ranks, got rank 0 "
                    f"{ranks[0][key]}, rank {rank} {its[key]}"
                )
        for name, shape in its["shapes"].items():
            if shapes.setdefault(name, shape) != shape:
                raise CheckpointError(
                    f"save {folder}: residual of {name!r}: shape must be the same on all ranks, "
                    f"got {shapes[name]}, rank {rank} {shape}"
                )


# -- files -----------------------------------------------------------------------------------------


def _write_state(path: Path, state: EngineState) -> dict[str, Any]:
    """Write one rank's file; returns the manifest's entry."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = state.as_dict()
    for kind, tensors in state.by_kind().items():
        data[kind] = {name: tensor.cpu() for name, tensor in tensors.items()}
    file = io.BytesIO()
    torch.save(data, file)
    content = file.getvalue()
    _write(path, content)
    l1 = l1_of(state.residual.values())
    return {"name": path.name, "nbytes": len(content), "sha256": _checksum(content), "l1": l1}


def _read_state(folder: Path, file: Mapping[str, Any], manifest: Mapping[str, Any]) -> EngineState:
    name = file["name"]
    content = (folder / name).read_bytes()
    if len(content) != file["nbytes"]:
        raise ConfigError(f"{name}: must have {file['nbytes']} bytes, got {len(content)}")
    if _checksum(content) != file["sha256"]:
        raise ConfigError(f"{name}: the checksum is another one: the file was changed")
    state = EngineState.from_dict(torch.load(io.BytesIO(content), weights_only=True))
    for key in ("step", "world_size"):
        if getattr(state, key) != manifest[key]:
            raise ConfigError(f"{name}: {key} must be {manifest[key]}, got {getattr(state, key)}")
    for stranger, why in state.strangers(manifest["shapes"]).items():
        raise ConfigError(f"{name}: residual of {stranger!r}: {why}")
    return state


def _write_manifest(folder: Path, manifest: Mapping[str, Any]) -> None:
    path, content = folder / MANIFEST, _canonical(manifest)
    text = json.dumps({"manifest": dict(manifest), "sha256": _checksum(content)}, indent=1)
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        _write(path, text.encode())


def _read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest, checked.

    Raises:
        OSError: It cannot be read.
        ConfigError: It is damaged, or is not a manifest of this package.
    """
    try:
        document = json.loads((folder / MANIFEST).read_bytes())
        manifest = document["manifest"]
        found = manifest["format"], manifest["version"]
    except (ValueError, KeyError, TypeError):
        raise ConfigError(f"{MANIFEST} is no manifest of a checkpoint") from None
    if found != (FORMAT, VERSION):
        raise ConfigError(f"{MANIFEST}: must be {FORMAT!r} of version {VERSION}, got {found}")
    if document.get("sha256") != _checksum(_canonical(manifest)) or manifest.keys() != KEYS:
        raise ConfigError(f"{MANIFEST}: the checksum is another one: the file was changed")
    names = [file["name"] for file in manifest["files"]]
    if len(names) != manifest["world_size"] or not all(map(FILE_NAME.fullmatch, names)):
        raise ConfigError(f"{MANIFEST}: files must be one for each rank, got {names}")
    return dict(manifest)


def _canonical(manifest: Mapping[str, Any]) -> bytes:
    return json.dumps(manifest, sort_keys=True, separators=(",", ":")).encode()


def _checksum(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _write(path: Path, content: bytes) -> None:
    """Write a file to the disk, and then put it in its place as a whole."""
    with replacing(path) as partial, partial.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _stands(folder: Path, name: str) -> bool:
    """Whether the folder's manifest names a file."""
    manifest, _ = _tried(lambda: _read_manifest(folder))
    return manifest is not None and name in {file["name"] for file in manifest["files"]}


def _remove_others(folder: Path, names: set[str]) -> None:
    """Remove the files of earlier checkpoints, finished or not, once all ranks have a new one."""
    for file in folder.iterdir():
        ours = FILE_NAME.fullmatch(file.name) or UNFINISHED.fullmatch(file.name)
        if ours and file.name not in names:
            file.unlink(missing_ok=True)

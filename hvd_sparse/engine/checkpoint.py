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
import math
import os
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from hvd_sparse._version import __version__
from hvd_sparse.checks import check_choice
from hvd_sparse.engine.state import EngineState, l1_of
from hvd_sparse.errors import CheckpointError, ConfigError, one_line, warn
from hvd_sparse.files import replacing

FORMAT, VERSION = "hvd_sparse checkpoint", 2
MANIFEST = "manifest.json"
FILE_NAME = re.compile(r"step-\d+-[0-9a-f]{16}-rank-\d+-of-\d+\.pt")
UNFINISHED = re.compile(r"\.[0-9a-f]{16}\.(pt|json)")
"""Files that `files.replacing` leaves behind where the process is killed."""
ATTEMPTS = 3
"""Manifests that are read where each one was replaced by the next."""
FILE_KEYS = frozenset({"name", "nbytes", "sha256", "l1"})
KEYS = frozenset({"format", "version", "package", "world_size", "step", "unit", "shapes", "files"})

Mine = TypeVar("Mine")
Told = TypeVar("Told")
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

    The folder is created if necessary; `state_of` returns this rank's state. CheckpointError on
    every rank, if any of them could not write.
    """
    folder = Path(path)
    ranks = Together(gather, "save", folder)

    def own_state() -> tuple[EngineState, dict[str, Any]]:
        state = EngineState.from_dict(state_of())
        state.rank, state.world_size = rank, world_size
        shapes = {name: list(tensor.shape) for name, tensor in state.residual.items()}
        token = secrets.token_hex(8)
        return state, {"token": token, "step": state.step, "unit": state.unit, "shapes": shapes}

    state, every = ranks.do(own_state)
    step, token = every[0]["step"], every[0]["token"]
    state.unit = _check_alike(every, folder)
    name = f"step-{step}-{token}-rank-{rank}-of-{world_size}.pt"
    try:
        _, files = ranks.do(lambda: (None, _write_state(folder / name, state)))
        manifest = {
            "format": FORMAT,
            "version": VERSION,
            "package": __version__,
            "world_size": world_size,
            "step": step,
            "unit": state.unit,
            "shapes": {name: shape for each in every for name, shape in each["shapes"].items()},
            "files": files,
        }
        ranks.do(lambda: (None, rank == 0 and _write_manifest(folder, manifest)))
        # Where hosts share no file system, the others have yet to write theirs.
        ranks.do(lambda: (None, _write_manifest(folder, manifest)))
    except CheckpointError:  # all ranks know of it; by another error rank 0 may still go on
        if not _stands(folder, name):
            _remove(folder, name.__eq__)
        raise
    new = {file["name"] for file in files}
    ours = (FILE_NAME, UNFINISHED)  # of earlier checkpoints, finished or not
    _remove(folder, lambda n: n not in new and any(form.fullmatch(n) for form in ours))


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
    checkpoint. `shapes` has the model's parameters, if they are known. CheckpointError on every
    rank, if any of them cannot load.
    """
    check_choice("missing", missing, ("refuse", "drop"))
    folder = Path(path)
    ranks = Together(gather, "load", folder)

    def read_manifest() -> tuple[dict[str, Any], tuple[str, int]]:
        manifest = _read_manifest(folder)
        return manifest, (_checksum(_canonical(manifest)), manifest["step"])

    def load() -> tuple[Loaded, str]:
        loaded = _load(folder, manifest, rank, world_size, shapes)
        return loaded, "; ".join(loaded.dropped)

    before: list[tuple[str, int]] = []
    for _ in range(ATTEMPTS):  # another job may save into the folder, and remove what is read
        manifest, seen = ranks.do(read_manifest)
        if seen == before:
            break
        before, faults = seen, [""]
        if len(set(seen)) == 1:
            loaded, faults = ranks.do(load)
            if not any(faults):
                return loaded
    if len(set(seen)) > 1:
        steps = ", ".join(f"rank {r} step {step}" for r, (_, step) in enumerate(seen))
        raise CheckpointError(f"load {folder}: ranks see different checkpoints: {steps}")
    if missing == "refuse":
        ranks.refuse(faults)
    return loaded


def _load(
    folder: Path,
    manifest: Mapping[str, Any],
    rank: int,
    world_size: int,
    shapes: Mapping[str, Sequence[int]] | None,
) -> Loaded:
    """This rank's part of a checkpoint, without what is damaged, missing or not of it."""
    total = EngineState(step=manifest["step"], unit=manifest["unit"])
    faults: list[str] = []
    lost = 0.0
    old_size = manifest["world_size"]
    for old_rank in range(rank, old_size, world_size):
        file = manifest["files"][old_rank]
        try:
            state = _read_state(folder, file, manifest)
            if state.rank != old_rank:
                raise ConfigError(f"{file['name']}: rank must be {old_rank}, got {state.rank}")
        except Exception as error:
            faults.append(_in_words(error))
            lost += file["l1"]
            continue
        total.add(state)
        total.planner, total.scale = total.planner or state.planner, total.scale or state.scale
        if old_size == world_size:
            total.buckets, total.rank, total.world_size = state.buckets, rank, world_size
    strangers = {} if shapes is None else total.strangers(shapes)
    faults += [f"residual of {name!r}: {why}" for name, why in strangers.items()]
    lost += total.drop(strangers)
    return Loaded(EngineState.from_dict(total.as_dict()).as_dict(), faults, lost)


# -- agreement -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Together:
    """What all ranks do to a folder together: each its part, and none fails alone."""

    gather: Gather
    what: str
    folder: Path

    def do(self, action: Callable[[], tuple[Mine, Told]]) -> tuple[Mine, list[Told]]:
        """Do this rank's part, which returns what stays here, and what all ranks hear."""
        mine, told, error = None, None, ""
        try:
            mine, told = action()
        except Exception as failure:
            error = _in_words(failure)
        every = self.gather((told, error))
        self.refuse([error for _, error in every])
        return cast("Mine", mine), [told for told, _ in every]

    def refuse(self, errors: Sequence[str]) -> None:
        """Raise CheckpointError where any rank has an error; all ranks have all errors."""
        ranks: dict[str, list[str]] = {}
        for rank, error in enumerate(errors):
            ranks.setdefault(error, []).append(str(rank))
        wrong = [f"rank {', '.join(those)}: {told}" for told, those in ranks.items() if told]
        if wrong:
            raise CheckpointError(f"{self.what} {self.folder}: {'; '.join(wrong)}")


def _in_words(error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return f"there is no {error.filename}"
    return one_line(error)


def _check_alike(ranks: Sequence[Mapping[str, Any]], folder: Path) -> float | None:
    """Returns the unit, which a rank that has just joined does not know."""
    shapes: dict[str, Any] = {}
    unit: float | None = next((u for its in ranks if (u := its["unit"]) is not None), None)
    for rank, its in enumerate(ranks):
        for key, common in (("step", ranks[0]["step"]), ("unit", unit)):
            if its[key] not in (None, common):
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
    return unit


# -- files -----------------------------------------------------------------------------------------


def _write_state(path: Path, state: EngineState) -> dict[str, Any]:
    """Write one rank's file; returns the manifest's entry."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = state.as_dict()
    for kind, tensors in state.by_kind().items():
        data[kind] = {name: _packed(tensor.cpu()) for name, tensor in tensors.items()}
    file = io.BytesIO()
    torch.save(data, file)
    content = file.getvalue()
    _write(path, content)
    l1 = l1_of(state.residual.values())
    return {"name": path.name, "nbytes": len(content), "sha256": _checksum(content), "l1": l1}


def _packed(tensor: Tensor) -> Tensor | dict[str, Tensor]:
    """A tensor by its bits that are not zero, where that is smaller; -0.0 is kept."""
    flat = tensor.flatten().numpy()
    indices = np.flatnonzero(flat.view(np.int32))
    if 2 * len(indices) >= len(flat) or len(flat) >= 2**31:
        return tensor
    kept = {"indices": indices.astype(np.int32), "values": flat[indices]}
    return {name: torch.from_numpy(part) for name, part in kept.items()}


def _unpacked(stored: Any, shape: Sequence[int]) -> Any:
    if not isinstance(stored, Mapping):
        return stored
    flat = np.zeros(math.prod(shape), np.float32)
    flat[stored["indices"].numpy()] = stored["values"].numpy()
    return torch.from_numpy(flat).reshape(tuple(shape))


def _read_state(folder: Path, file: Mapping[str, Any], manifest: Mapping[str, Any]) -> EngineState:
    name = file["name"]
    content = (folder / name).read_bytes()
    if len(content) != file["nbytes"]:
        raise ConfigError(f"{name}: must have {file['nbytes']} bytes, got {len(content)}")
    if _checksum(content) != file["sha256"]:
        raise ConfigError(f"{name}: the checksum is another one: the file was changed")
    data = torch.load(io.BytesIO(content), weights_only=True)
    for kind in ("residual", "momentum"):
        shapes = manifest["shapes"]
        data[kind] = {key: _unpacked(part, shapes.get(key, ())) for key, part in data[kind].items()}
    state = EngineState.from_dict(data)
    for key in ("step", "world_size"):
        if getattr(state, key) != manifest[key]:
            raise ConfigError(f"{name}: {key} must be {manifest[key]}, got {getattr(state, key)}")
    for stranger, why in state.strangers(manifest["shapes"]).items():
        raise ConfigError(f"{name}: residual of {stranger!r}: {why}")
    return state


def _write_manifest(folder: Path, manifest: Mapping[str, Any]) -> bool:
    """Write it, unless it is there already; returns whether this call did."""
    path, content = folder / MANIFEST, _canonical(manifest)
    document = {"manifest": dict(manifest), "sha256": _checksum(content)}
    text = json.dumps(document, indent=1).encode()
    if path.exists() and path.read_bytes() == text:
        return False
    _write(path, text)
    return True


def _read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest, checked; ConfigError where it is damaged or not of this package."""
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
    files = manifest["files"]
    whole = all(f.keys() == FILE_KEYS and FILE_NAME.fullmatch(f["name"]) for f in files)
    if len(files) != manifest["world_size"] or not whole:
        raise ConfigError(f"{MANIFEST}: files must be one for each rank, got {files}")
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
    try:
        return name in {file["name"] for file in _read_manifest(folder)["files"]}
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, ConfigError):  # there is none
        return False
    except Exception:  # it cannot be read now
        return True


def _remove(folder: Path, is_left: Callable[[str], bool]) -> None:
    """Remove files; what cannot be removed harms nothing, and the next checkpoint removes it."""
    for file in list(folder.glob("*")):  # none where it is no folder
        try:
            if is_left(file.name):
                file.unlink(missing_ok=True)
        except OSError as error:
            warn(f"what an earlier checkpoint left cannot be removed: {error}")

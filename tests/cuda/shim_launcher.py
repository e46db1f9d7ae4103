"""Runs the CUDA sources on the CPU: see shim/shim.h for how, and what that can find."""

from __future__ import annotations

import hashlib
import os
import shutil
import struct
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np
import pytest
import torch
from torch import Tensor

from hvd_sparse.ops.cuda import AddressTable, Argument
from hvd_sparse.ops.cuda import _sources as cuda_sources
from hvd_sparse.ops.cuda._launcher import THREADS

ROOT = Path(__file__).resolve().parents[2]
SHIM = Path(__file__).parent / "shim"
BUILD = ROOT / "build" / "shim"

LARGEST_BYTES = 1 << 26
"""Of an argument's storage, in tests."""
FAMILIES = tuple(sorted(set(cuda_sources.kernels().values())))
COMMON_FLAGS = ("-std=c++17", "-g1", "-ffp-contract=off", "-fno-strict-aliasing")
SANITIZED = ("-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
TRACED = ("-O1", "-fsanitize=thread")
"""Fibers give way at every access to memory; shim.cpp takes the place of ThreadSanitizer."""


class KernelFailure(AssertionError):
    """A launch went wrong: a sanitizer's report, a deadlock, a trap."""


@dataclass(frozen=True)
class Mutation:
    """A mistake in a kernel.

    Attributes:
        family: The source, in csrc/cuda.
        after: Text that stands once in the source or its includes.
        old: What is replaced, where it first comes after that: a statement with its semicolon, or
            an expression.
        new: What takes its place.
    """

    family: str
    after: str
    old: str
    new: str

    def place(self, text: str) -> int:
        """Where in the source `old` begins."""
        assert text.count(self.after) == 1, f"{self.after!r} must stand once in {self.family}"
        return text.index(self.old, text.index(self.after) + len(self.after))

    def chosen(self, number: int) -> str:
        """What stands there instead of `old`: both, one of which runs."""
        if self.old.endswith(";"):
            return f"if (shim::IsMutated({number})) {{ {self.new} }} else {{ {self.old} }}"
        return f"(shim::IsMutated({number}) ? ({self.new}) : ({self.old}))"


class Shim:
    """A program that holds kernels and serves launches.

    Args:
        families: Names of sources in csrc/cuda.
        flags: `SANITIZED` or `TRACED`.
        mutations: Mistakes to build in; each launcher chooses one, or none.
    """

    def __init__(
        self,
        families: Sequence[str],
        flags: Sequence[str] = SANITIZED,
        mutations: Sequence[Mutation] = (),
    ) -> None:
        compiler = shutil.which(os.environ.get("CXX", "g++"))
        if compiler is None:
            pytest.skip("no C++ compiler")
        BUILD.mkdir(parents=True, exist_ok=True)
        sanitized = flags is SANITIZED
        runtime_flags = ["-O2", *(["-DHVDS_ADDRESS_SANITIZER"] if sanitized else [])]
        command = [compiler, *COMMON_FLAGS, f"-I{SHIM}", "-DHVDS_SHIM"]
        headers = "".join(
            path.read_text() for path in (SHIM / "shim.h", ROOT / "csrc" / "cpu" / "bits.h")
        )
        jobs = [([*command, *runtime_flags], "runtime", (SHIM / "shim.cpp").read_text(), headers)]
        for family in families:
            text = mutated(cuda_sources.source(family), family, mutations)
            text += "".join(
                f"HVDS_SERVE({kernel})\n"
                for kernel, of in cuda_sources.kernels().items()
                if of == family
            )
            jobs.append(([*command, *flags], family, text, headers))
        with ThreadPoolExecutor(2) as pool:
            objects = list(pool.map(lambda job: _compiled(*job), jobs))
        self.program = _linked([compiler, *(flags if sanitized else ())], objects)

    def launcher(self, seed: int, mutation: int | None = None) -> ShimLauncher:
        """A launcher of these kernels, for tensors on the CPU."""
        return ShimLauncher(self.program, seed, mutation)


def mutated(text: str, family: str, mutations: Sequence[Mutation]) -> str:
    """The source with all of its family's mutations built in, numbered as in the list."""
    places = [
        (mutation.place(text), number, mutation)
        for number, mutation in enumerate(mutations)
        if mutation.family == family
    ]
    for place, number, mutation in sorted(places, reverse=True, key=lambda found: found[:2]):
        end = place + len(mutation.old)
        text = text[:place] + mutation.chosen(number) + text[end:]
    return text


def _compiled(command: Sequence[str], name: str, text: str, headers: str) -> Path:
    key = hashlib.sha256("\0".join([*command, text, headers]).encode()).hexdigest()[:16]
    source, output = BUILD / f"{name}-{key}.cpp", BUILD / f"{name}-{key}.o"
    if not output.exists():
        source.write_text(text)
        _build([*command, "-c", str(source), "-o"], output)
    return output


def _linked(command: Sequence[str], objects: Sequence[Path]) -> Path:
    names = [path.name for path in objects]
    key = hashlib.sha256("\0".join([*command, *names]).encode()).hexdigest()[:16]
    output = BUILD / f"shim-{key}"
    if not output.exists():
        _build([*command, *map(str, objects), "-o"], output)
    return output


def _build(command: Sequence[str], output: Path) -> None:
    """Builds beside the output and renames: another process may build the same."""
    fresh = output.with_suffix(f".{os.getpid()}")
    done = subprocess.run([*command, str(fresh)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    fresh.replace(output)


class ShimLauncher:
    """Launches kernels of a `Shim` on tensors in the CPU's memory.

    Each launch gets copies of the arguments' storages, each in an allocation of its own, and
    everything is copied back. Each launch has another seed, drawn from this launcher's.
    """

    def __init__(self, program: Path, seed: int, mutation: int | None = None) -> None:
        self._seeds = np.random.default_rng(seed)
        chosen = {} if mutation is None else {"HVDS_MUTATION": str(mutation)}
        self._process = subprocess.Popen(
            [program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, **chosen},
        )

    def close(self) -> None:
        """Ends the program."""
        self._process.communicate()

    def launch(self, kernel: str, blocks: int, *arguments: Argument) -> None:
        """See `hvd_sparse.ops.cuda.Launcher`."""
        if blocks == 0:
            return
        memory = _Memory()
        encoded = b"".join(memory.encode(argument) for argument in arguments)
        seed = int(self._seeds.integers(2**63))
        name = kernel.encode()
        request = [
            struct.pack("<I", len(name)) + name,
            struct.pack("<IIQ", blocks, THREADS, seed),
            memory.contents(),
            struct.pack("<I", len(memory.relocations)),
            *memory.relocations,
            struct.pack("<I", len(arguments)),
            encoded,
        ]
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            for part in request:
                self._process.stdin.write(part)
            self._process.stdin.flush()
            if self._process.stdout.read(4) == b"\0\0\0\0":
                memory.update(self._process.stdout)
                return
        except BrokenPipeError:
            pass
        assert self._process.stderr is not None
        report = self._process.stderr.read().decode(errors="replace")
        self._process.wait(10)
        raise KernelFailure(f"{kernel} on {blocks} blocks, seed {seed}:\n{report[:6000]}")


class _Memory:
    """The storages of a launch's arguments."""

    def __init__(self) -> None:
        self._buffers: dict[int, tuple[int, np.ndarray]] = {}  # by address: number, bytes
        self.relocations: list[bytes] = []

    def encode(self, argument: Argument) -> bytes:
        """The argument as shim.cpp reads it."""
        if argument is None:
            return struct.pack("<B", 2)
        if isinstance(argument, AddressTable):
            buffer, offset = self._place(argument.rows)
            row_bytes = argument.rows.stride(0) * argument.rows.element_size()
            for row, tensor in enumerate(argument.tensors):
                place = (buffer, offset + row * row_bytes)
                self.relocations.append(struct.pack("<IQIQ", *place, *self._place(tensor)))
            return struct.pack("<BIQ", 1, buffer, offset)
        if isinstance(argument, Tensor):
            return struct.pack("<BIQ", 1, *self._place(argument))
        raw = argument.tobytes()
        return struct.pack("<BB", 0, len(raw)) + raw.ljust(8, b"\0")

    def _place(self, tensor: Tensor) -> tuple[int, int]:
        """The number of the tensor's buffer, and its offset there in bytes."""
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if storage.nbytes() > LARGEST_BYTES:
            raise KernelFailure(f"an argument has {storage.nbytes()} bytes: a wrong count?")
        if address not in self._buffers:
            data = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
            self._buffers[address] = (len(self._buffers), data)
        return self._buffers[address][0], tensor.storage_offset() * tensor.element_size()

    def contents(self) -> bytes:
        """The buffers as shim.cpp reads them."""
        parts = [struct.pack("<I", len(self._buffers))]
        for _, data in self._buffers.values():
            parts += [struct.pack("<Q", data.nbytes), data.tobytes()]
        return b"".join(parts)

    def update(self, stream: IO[bytes]) -> None:
        """Reads the buffers back."""
        for _, data in self._buffers.values():
            if data.nbytes:
                data[:] = np.frombuffer(stream.read(data.nbytes), np.uint8)

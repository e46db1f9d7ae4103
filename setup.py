"""Builds the native library, `hvd_sparse/_native.so`, from `csrc/cpu`, and ships `csrc/cuda`.

Everything else about the package stands in pyproject.toml. The library has a plain C interface and
is loaded with ctypes: no Python or torch headers, hence one wheel for every Python 3 of a platform.
`CXX` and `CXXFLAGS` are honoured.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py
from setuptools.command.editable_wheel import editable_wheel

ROOT = Path(__file__).parent.resolve()
SOURCE_DIR = Path("csrc/cpu")
CUDA_SOURCE_DIR = Path("csrc/cuda")
SHIPPED_CUDA_DIR = Path("hvd_sparse/csrc/cuda")  # in a wheel; a checkout has them where they are
LIBRARY = Path("hvd_sparse/_native.so")
COMPILE_FLAGS = (
    "-O3",
    "-std=c++17",
    "-fPIC",
    "-ffp-contract=off",  # one rounding per operation: every instruction set gives the same bits
    "-pthread",
    "-fvisibility=hidden",
    "-Wall",
    "-Wextra",
)
LINK_FLAGS = ("-shared", "-pthread")


def compiler() -> list[str]:
    """The C++ compiler's command, from `$CXX` or g++."""
    command = shlex.split(os.environ.get("CXX", "g++"))
    if not command or shutil.which(command[0]) is None:
        name = command[0] if command else "CXX=''"
        raise SystemExit(
            f"hvd_sparse: no C++ compiler {name!r}: install one (apt-get install g++) or set CXX"
        )
    return command


def front_page() -> str:
    """README.md as a package index shows it: with whole addresses in the place of relative ones."""
    project, version = (ROOT / "pyproject.toml").read_text(), (ROOT / "hvd_sparse" / "_version.py")
    (address,) = re.findall(r'^Repository = "(.+)"$', project, re.MULTILINE)
    (number,) = re.findall(r'^__version__ = "(.+)"$', version.read_text(), re.MULTILINE)

    def whole(link: re.Match[str]) -> str:
        kind = "raw" if link[1] else "blob"
        return f"{link[1]}[{link[2]}]({address}/{kind}/v{number}/{link[3]})"

    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return re.sub(r"(!?)\[([^]]*)\]\((?![a-z]+:|#)([^)]+)\)", whole, text)


def is_older(output: Path, inputs: list[Path]) -> bool:
    """Whether `output` is missing or older than any of `inputs`."""
    return not output.exists() or output.stat().st_mtime < max(
        path.stat().st_mtime for path in inputs
    )


def check_loads(library: Path, command: list[str]) -> None:
    """Refuse what a compiler left that failed without saying so."""
    load = "import ctypes, sys; ctypes.CDLL(sys.argv[1]).hvds_abi_version()"
    done = subprocess.run(
        [sys.executable, "-c", load, str(library)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        why = (done.stderr.strip().splitlines() or [f"exit {done.returncode}"])[-1]
        raise SystemExit(f"hvd_sparse: {shlex.join(command)} made no library that loads: {why}")


class BuildPackage(build_py):
    """Copies the modules into an empty folder: an earlier build may have left deleted ones."""

    def run(self) -> None:
        if not self.editable_mode:
            shutil.rmtree(ROOT / self.build_lib / "hvd_sparse", ignore_errors=True)
        super().run()


class BuildNative(build_ext):
    """Compiles each source to an object, links them, and puts the library beside the package."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.extensions = []

    def run(self) -> None:
        sources = sorted((ROOT / SOURCE_DIR).glob("*.cpp"))
        headers = [*sorted((ROOT / SOURCE_DIR).glob("*.h")), Path(__file__).resolve()]
        flags = [*COMPILE_FLAGS, *shlex.split(os.environ.get("CXXFLAGS", ""))]
        # Of this compiler and these flags: what others have left is not taken for theirs.
        key = hashlib.sha256(repr((os.environ.get("CXX"), flags)).encode()).hexdigest()[:8]
        objects_dir = ROOT / self.build_temp / f"native-{key}"
        objects = {source: objects_dir / f"{source.stem}.o" for source in sources}
        stale = [s for s, o in objects.items() if self.force or is_older(o, [s, *headers])]
        library = self._library()
        command = compiler()
        objects_dir.mkdir(parents=True, exist_ok=True)
        library.parent.mkdir(parents=True, exist_ok=True)

        def compile_one(source: Path) -> None:
            self._call([*command, *flags, "-c", str(source), "-o", str(objects[source])])

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(compile_one, stale))
        # Linked beside and renamed: a process that has the old library mapped keeps it intact.
        fresh = library.with_suffix(".so.new")
        fresh.unlink(missing_ok=True)
        linked = [str(path) for path in objects.values()]
        self._call([*command, *linked, *flags, *LINK_FLAGS, "-o", str(fresh)])
        if not any(
            flag.startswith("-fsanitize") for flag in flags
        ):  # such a library needs LD_PRELOAD
            check_loads(fresh, command)
        fresh.replace(library)
        if not self.inplace:
            shipped = ROOT / self.build_lib / SHIPPED_CUDA_DIR
            shutil.rmtree(shipped, ignore_errors=True)
            shutil.copytree(ROOT / CUDA_SOURCE_DIR, shipped)

    def get_source_files(self) -> list[str]:
        """What a source distribution has to carry."""
        return [
            str(path.relative_to(ROOT))
            for folder in (SOURCE_DIR, CUDA_SOURCE_DIR)
            for path in sorted((ROOT / folder).iterdir())
        ]

    def get_outputs(self) -> list[str]:
        shipped = Path(self.build_lib) / SHIPPED_CUDA_DIR
        kernels = [] if self.inplace else [str(path) for path in (ROOT / shipped).glob("*")]
        return [str(self._library()), *kernels]

    def get_output_mapping(self) -> dict[str, str]:
        if not self.inplace:
            return {}
        return {str(Path(self.build_lib) / LIBRARY): str(ROOT / LIBRARY)}

    def _library(self) -> Path:
        return (ROOT if self.inplace else ROOT / self.build_lib) / LIBRARY

    @staticmethod
    def _call(command: list[str]) -> None:
        print(shlex.join(command), flush=True)
        try:
            subprocess.run(command, check=True)
        except subprocess.CalledProcessError as error:
            raise SystemExit(f"hvd_sparse: {command[0]} failed with {error.returncode}") from None


class PlatformWheel(bdist_wheel):
    """Tags the wheel py3-none-<platform>: the library does not depend on the Python version."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.root_is_pure = False

    def get_tag(self) -> tuple[str, str, str]:
        return ("py3", "none", super().get_tag()[2])


class VisibleEditable(editable_wheel):
    """Puts the checkout on the path, where the default is a hook that mypy does not see."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.mode = self.mode or "compat"


class NativeDistribution(Distribution):
    """A distribution with a library to build, though without extension modules."""

    def has_ext_modules(self) -> bool:
        return True


setup(
    distclass=NativeDistribution,
    long_description=front_page(),
    long_description_content_type="text/markdown",
    cmdclass={
        "build_py": BuildPackage,
        "build_ext": BuildNative,
        "bdist_wheel": PlatformWheel,
        "editable_wheel": VisibleEditable,
    },
)

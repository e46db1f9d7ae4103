"""The command line: every subcommand's help, and `check`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import hvd_sparse
from hvd_sparse import ops
from hvd_sparse.cli import check
from hvd_sparse.cli.command import Command, Output, bytes_per_s, seconds
from hvd_sparse.cli.main import COMMANDS, FAILED, INTERRUPTED, main, make_parser
from hvd_sparse.cli.profile import device_of_rank
from hvd_sparse.errors import ConfigError, say
from hvd_sparse.policy import load_policy


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_every_help_has_examples_that_parse(command: Command, capsys: Any) -> None:
    with pytest.raises(SystemExit) as ended:
        main([command.name, "--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    for example in command.examples:
        assert example in shown
        _, _, arguments = example.partition(" > ")[0].partition("hvd-sparse ")
        assert make_parser().parse_args(arguments.split()).command is command
    assert ("--json" in shown) == (command.name != "tuned")


def test_without_a_command(capsys: Any) -> None:
    with pytest.raises(SystemExit) as ended:
        main([])
    assert ended.value.code == FAILED
    assert "COMMAND" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ConfigError("density: too much"), FAILED),
        (OSError("disk full"), FAILED),
        (KeyboardInterrupt("interrupted"), INTERRUPTED),
    ],
)
def test_an_end_is_one_line(
    error: BaseException, status: int, monkeypatch: Any, capsys: Any
) -> None:
    def fail(options: Any) -> Output:
        raise error

    command = Command("fail", "fail", (), lambda parser: None, fail)
    monkeypatch.setattr("hvd_sparse.cli.main.COMMANDS", (command,))
    assert main(["fail"]) == status
    assert capsys.readouterr().err == f"hvd-sparse fail: {error}\n"


def checked(monkeypatch: Any, capsys: Any, **environment: str) -> tuple[int, dict[str, Any]]:
    for name in list(os.environ):
        if name.startswith(("HVD_SPARSE_", "HOROVOD_")):
            monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    status = main(["check", "--quick", "--json"])
    report = json.loads(capsys.readouterr().out)
    return status, {f["name"]: f for f in report["findings"]}


def test_check_tells_what_is_here(monkeypatch: Any, capsys: Any) -> None:
    _, found = checked(monkeypatch, capsys)
    assert f"hvd_sparse {hvd_sparse.__version__}" in found["versions"]["detail"]
    expected = "slow" if ops.backend() == "reference" else ops.backend()
    assert expected in found["native library"]["detail"]
    assert found["transport gloo"]["state"] == "ok"
    assert "gloo" in found["transport auto"]["detail"]
    assert "nccl" not in found["transport auto"]["detail"]  # which has to be asked for


def test_check_names_what_the_environment_decides(monkeypatch: Any, capsys: Any) -> None:
    _, found = checked(monkeypatch, capsys, HVD_SPARSE_TRANSPORT="gloo")
    assert found["transport auto"]["detail"] == "gloo, because HVD_SPARSE_TRANSPORT says so"
    status, found = checked(
        monkeypatch, capsys, HVD_SPARSE_TRANSPORT="pigeon", HOROVOD_CACHE_CAPACITY="0"
    )
    assert status == 1
    assert "one of auto, gloo" in found["transport auto"]["detail"]
    assert found["HOROVOD_CACHE_CAPACITY"]["state"] == "problem"


def test_check_names_variables_that_nothing_reads(monkeypatch: Any, capsys: Any) -> None:
    given = {"HVD_SPARSE_IFACE": "bogus0", "HVD_SPARSE_TRANSPROT": "mpi", "HVD_SPARSE_BIND": "1"}
    given |= {"HVD_SPARSE_NATIVE": "false"}
    status, found = checked(monkeypatch, capsys, HVD_SPARSE_POLICY="", **given)
    assert status == 1
    assert [found[name]["state"] for name in given] == ["problem", "problem", "ok", "problem"]
    assert "HVD_SPARSE_POLICY" not in found
    assert found["HVD_SPARSE_NATIVE"]["detail"] == "false is none of 0, 1: unset it"
    assert found["HVD_SPARSE_IFACE"]["detail"].startswith("bogus0 is no usable interface; usable: ")
    assert "did you mean HVD_SPARSE_TRANSPORT?" in found["HVD_SPARSE_TRANSPROT"]["detail"]


def test_check_tries_what_the_environment_asks_for(
    tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    without_mpi = check.Finding("horovod", "ok", "0.28.1, built with gloo")
    monkeypatch.setattr(check, "horovod", lambda: without_mpi)
    (tmp_path / "file").touch()
    here = {"HVD_SPARSE_TRANSPORT": "mpi", "XDG_CACHE_HOME": str(tmp_path / "file")}
    status, found = checked(monkeypatch, capsys, **here)
    assert status == 1
    assert found["transport auto"] == {
        "name": "transport auto",
        "state": "problem",
        "detail": "HVD_SPARSE_TRANSPORT=mpi, but Horovod was built without MPI: mend that, or "
        "unset HVD_SPARSE_TRANSPORT",
    }
    assert found["cache"]["detail"].endswith("set XDG_CACHE_HOME, or a policy's plan_cache")
    if not torch.cuda.is_available():
        _, found = checked(monkeypatch, capsys, HVD_SPARSE_TRANSPORT="nccl")
        assert "nccl, but torch sees no CUDA device: mend" in found["transport auto"]["detail"]


@pytest.mark.launches
def test_check_takes_a_step_as_training_does(tmp_path: Path, monkeypatch: Any) -> None:
    pytest.importorskip("horovod.torch", reason="Horovod is not installed")
    step = check.trial_step()
    assert step.state == "ok"
    assert step.detail.removeprefix("2 ranks of this machine, by ") in ("gloo", "mpi")
    (tmp_path / "hvd_sparse.py").write_text("raise ImportError('not whole')\n")
    monkeypatch.chdir(tmp_path)
    step = check.trial_step()
    assert step.state == "problem"
    assert step.detail.startswith("ImportError: not whole; see `")


def test_check_reads_the_policy(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text("version: 1\nrules: [{compress: never}]\n")
    _, found = checked(monkeypatch, capsys, HVD_SPARSE_POLICY=str(path))
    assert found["HVD_SPARSE_POLICY"]["detail"].endswith("policy.yaml: valid, 1 rules")
    path.write_text("version: 1\nrules: [{compress: maybe}]\n")
    status, found = checked(monkeypatch, capsys, HVD_SPARSE_POLICY=str(path))
    assert status == 1
    assert "policy.yaml:2: rules[0].compress" in found["HVD_SPARSE_POLICY"]["detail"]


def test_check_without_horovod(monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr(check, "_version", lambda name: None)
    status, found = checked(monkeypatch, capsys)
    assert status == 1
    assert found["horovod"]["state"] == "problem"
    assert found["transport mpi"]["state"] == "none"


def test_a_horovod_that_does_not_load(monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr(check, "_version", lambda name: "0.28.1")
    monkeypatch.setitem(sys.modules, "horovod.torch", None)
    _, found = checked(monkeypatch, capsys)
    assert found["horovod"]["detail"].startswith("0.28.1 does not load: ModuleNotFoundError")


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (["--version"], f"hvd-sparse {hvd_sparse.__version__}"),
        (
            ["simulate", "--ranks", "1", "--numel", "9", "--algorithms", "gtopk"],
            "k = 1, ? = 0.0001",
        ),
    ],
)
def test_as_a_process(arguments: list[str], shown: str) -> None:
    """And what the terminal cannot show is no error."""
    root = Path(hvd_sparse.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-m", "hvd_sparse", *arguments],
        env={**os.environ, "PYTHONPATH": str(root), "PYTHONIOENCODING": "latin-1"},
        capture_output=True,
        encoding="latin-1",
        check=True,
        timeout=60,
    )
    assert shown in done.stdout


@pytest.fixture
def small_sweep(monkeypatch: Any) -> None:
    monkeypatch.setattr("hvd_sparse.planner.measure.NUMELS", (1 << 8, 1 << 12))


ALWAYS = """version: 1
rules:
  - {match: {name: 'table*'}, compress: always, compressor: topk}
  - {compress: auto, compressor: topk, wire: WIRE}
"""


@pytest.mark.usefixtures("small_sweep")
def test_plan_compares_what_it_can_change_on_the_wire_of_the_policy(
    tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    """A tensor that is always compressed costs the same in every plan."""
    (tmp_path / "always_model.py").write_text(
        "from torch import nn\ndef make(): return nn.ModuleDict(\n"
        " {'table': nn.Embedding(2000, 1000), 'head': nn.Linear(1000, 100)})\n"
    )
    monkeypatch.chdir(tmp_path)
    plan = ["plan", "always_model:make", "--bandwidth", "10mbit", "--latency", "1us"]
    reports = []
    for wire in ("float32", "qsgd4+gap"):
        (tmp_path / "policy.yaml").write_text(ALWAYS.replace("WIRE", wire))
        assert main([*plan, "--policy", "policy.yaml", "--json"]) == 0
        reports.append(json.loads(capsys.readouterr().out))
        table, head = reports[-1]["tensors"][:2]
        assert table["reason"] == "the policy says so"
        assert head["choice"].startswith("topk")
        assert reports[-1]["dense_s"] < table["dense_s"] / 10
    plain, rounded = (report["tensors"][1]["sparse_s"] for report in reports)
    assert rounded < plain / 2
    assert main([*plan, "--policy", "policy.yaml"]) == 0
    assert "all reductions but of what is always compressed: " in capsys.readouterr().out


def test_a_reader_that_leaves_costs_no_result(tmp_path: Path) -> None:
    """As `| less` where it is quit: neither the file, nor the command's status."""
    read, write = os.pipe()
    os.close(read)
    work = ["simulate", "--ranks", "4", "--numel", "10000", "--json", "scaling.json"]
    command = [sys.executable, "-m", "hvd_sparse", *work]
    with os.fdopen(write, "wb") as closed:
        done = subprocess.run(
            command, cwd=tmp_path, stdout=closed, stderr=subprocess.PIPE, check=False, timeout=60
        )
    assert (done.returncode, b"Traceback" in done.stderr) == (0, False)
    assert json.loads((tmp_path / "scaling.json").read_text())


def test_what_is_said_goes_nowhere_else(monkeypatch: Any, capsys: Any) -> None:
    """Python has None in the place of a standard error that was closed."""
    monkeypatch.setattr(sys, "stderr", None)
    say("a line")
    assert capsys.readouterr().out == ""


@pytest.mark.usefixtures("small_sweep")
def test_plan_shows_every_tensor_and_why(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    (tmp_path / "plan_model.py").write_text(
        "import argparse\nfrom torch import nn\nargparse.ArgumentParser().parse_args()\n"
        "def make(): return nn.Sequential(nn.Linear(2000, 1000))\n"
    )
    monkeypatch.chdir(tmp_path)
    slow = ["plan", "plan_model:make", "--ranks", "8", "--bandwidth", "10mbit", "--latency", "1us"]
    assert main([*slow, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [t["name"] for t in report["tensors"]] == ["0.weight", "0.bias"]
    assert report["tensors"][0]["choice"].startswith("topk collective=")
    assert report["tensors"][0]["reason"].startswith("encode + decode")
    assert report["predicted_s"] < report["dense_s"] / 5
    terms = {name: report["tensors"][0][f"{name}_s"] for name in ("dense", "sparse", "encode")}
    assert terms["encode"] + report["tensors"][0]["decode_s"] < terms["dense"] - terms["sparse"]
    assert report["tensors"][1]["reason"] == "under 1024 elements (dense_below)"
    assert main([*slow[:4], "--bandwidth", "10Mb/s", *slow[6:]]) == 0
    shown = capsys.readouterr().out
    assert "8 ranks; costs: cost model" in shown
    assert "without other traffic; backward hides nothing (--backward)" in shown
    assert max(map(len, shown.splitlines())) <= 100
    fast = [*slow[:4], "--bandwidth", "100tbit", "--latency", "1ns", "--backward", "10ms"]
    assert main(fast) == 0
    assert "encode + decode" in capsys.readouterr().out
    policy = tmp_path / "policy.yaml"
    plot, pinned = tmp_path / "step.png", tmp_path / "pinned.yaml"
    assert main([*slow, "--plot", str(plot), "--write-policy", str(pinned)]) == 0
    assert "encoding and decoding as measured on this CPU" in capsys.readouterr().out
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert "# A plan of hvd-sparse" in pinned.read_text()
    assert not load_policy(pinned).rules[0].is_auto
    assert main(["validate", str(pinned), "--model", "plan_model:make"]) == 0
    for wrong, told in (
        (["--hosts", "2", "--local", "2"], "--ranks must be 4, --hosts times --local, got 8"),
        (["--local", "2"], "--local must be 1 without --hosts, got 2"),
    ):
        assert main([*slow, *wrong]) == FAILED
        assert told in capsys.readouterr().err
    assert main([*slow, "--plot", "step.xyz"]) == FAILED
    assert "step.xyz: a plot ends in one of" in capsys.readouterr().err
    policy.write_text("version: 1\nrules: [{compress: never}]\n")
    assert main([*slow, "--policy", str(policy)]) == FAILED
    assert "no rule with compress: auto" in capsys.readouterr().err


def test_a_profile_is_taken_where_gradients_are() -> None:
    assert device_of_rank("cpu", 3) == torch.device("cpu")
    if torch.cuda.is_available():
        assert device_of_rank("cuda", 0) == torch.device("cuda", 0)
    else:
        with pytest.raises(ConfigError, match="--device cuda: torch sees no CUDA device"):
            device_of_rank("cuda", 0)


@pytest.mark.parametrize(
    ("value", "rate"),
    [
        *(("1gbit", 1.25e8), ("1Gb/s", 1.25e8), ("2 GB/s", 2e9), ("8kbps", 1e3)),
        *((".5gbit", 6.25e7), ("1e3mbit", 1.25e8), ("1.E-3tbit", 1.25e8)),
    ],
)
def test_rates_are_taken_as_people_write_them(value: str, rate: float) -> None:
    assert bytes_per_s(value) == rate


@pytest.mark.parametrize("value", ["5us", "5 µs", "5μs", "5e3NS", ".005ms"])
def test_times_are_taken_as_people_write_them(value: str) -> None:
    assert seconds(value) == pytest.approx(5e-6)


@pytest.mark.parametrize("value", ["fast", "0gbit", "25", "-1gbit", "25parsec", "1e999gbit"])
def test_rates_are_checked(value: str, capsys: Any) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "x:y", f"--bandwidth={value}"])
    assert f"as 25gbit; got {value!r}" in capsys.readouterr().err


def test_profile_needs_more_than_one_rank() -> None:
    pytest.importorskip("horovod.torch", reason="Horovod is not installed")
    root = Path(hvd_sparse.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-m", "hvd_sparse", "profile"],
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == FAILED
    assert "hvd-sparse profile: one rank exchanges nothing" in done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_a_kernel_that_does_not_run_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "H100")
    monkeypatch.setattr(check, "_version", lambda name: "14.0")
    finding = check.cuda()
    assert finding.state == "problem"
    assert finding.detail.startswith("H100, cupy-cuda12x 14.0: ")

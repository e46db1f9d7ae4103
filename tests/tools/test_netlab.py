"""The network lab itself: what its hosts are, what its links carry, and that nothing is left."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tools.netlab import Netlab, NetlabError, Network, missing
from tools.netlab.lab import bytes_per_s

REPOSITORY = Path(__file__).resolve().parents[2]
needs_netlab = pytest.mark.netlab
pytestmark = [pytest.mark.timeout(120), pytest.mark.slow]

RECEIVER = """
import socket
with socket.create_server(("0.0.0.0", 9000)) as server:
    print("listening", flush=True)
    peer, _ = server.accept()
    while numel := int.from_bytes(peer.recv(4, socket.MSG_WAITALL), "big"):
        while numel:
            numel -= len(peer.recv(numel))
        peer.sendall(b"x")
"""
"""Takes messages of 4 bytes of length and so many bytes; answers each with one byte."""

SENDER = """
import socket, sys, time
address, *lengths = sys.argv[1:]
with socket.create_connection((address, 9000)) as peer:
    for length in map(int, lengths):
        time.sleep(0.1)
        start = time.monotonic()
        peer.sendall(length.to_bytes(4, "big") + bytes(length))
        peer.recv(1)
        print(time.monotonic() - start, flush=True)
    peer.sendall(bytes(4))
"""


def said_by(command: list[str]) -> str:
    """What a command prints, once it has succeeded."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@contextlib.contextmanager
def receiver(network: Network, host: str) -> Iterator[None]:
    """A process on a host that takes one sender's messages."""
    command = network.on(host, [sys.executable, "-c", RECEIVER])
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "listening\n"
        try:
            yield
            process.wait(60)
        finally:
            process.kill()


def seconds_to_send(network: Network, source: str, target: str, *lengths: int) -> list[float]:
    """How long each message takes from one host to another, and the answer back."""
    address = f"10.77.0.{target.removeprefix('nl')}"
    program = [sys.executable, "-c", SENDER, address, *map(str, lengths)]
    with receiver(network, target):
        return [float(line) for line in said_by(network.on(source, program)).split()]


def are_gone(pids: list[int], within_s: float = 10.0) -> bool:
    deadline = time.monotonic() + within_s
    while any(psutil.pid_exists(pid) for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


# --- hosts ----------------------------------------------------------------------------------------


@needs_netlab
def test_a_host_has_a_name_an_address_and_one_interface(netlab: Network) -> None:
    assert netlab.names == ["nl1", "nl2", "nl3", "nl4"]
    assert netlab.slots(2) == "nl1:2,nl2:2,nl3:2,nl4:2"
    program = (
        "import os, socket; print(socket.gethostname(), *map(socket.gethostbyname, "
        "('nl1', 'nl4')), sorted(os.listdir('/sys/class/net')))"
    )
    said = said_by(netlab.on("nl3", [sys.executable, "-c", program]))
    assert said == "nl3 10.77.0.1 10.77.0.4 ['eth0', 'lo']\n"


@needs_netlab
def test_a_command_has_its_callers_directory_and_environment(
    netlab: Network, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OF_THE_CALLER", "1 2")
    said = said_by(netlab.on("nl1", ["sh", "-c", 'pwd; echo "$OF_THE_CALLER"']))
    assert said == f"{tmp_path}\n1 2\n"


@needs_netlab
def test_ssh_reaches_the_hosts(netlab: Network) -> None:
    for words in (
        ["-o", "ConnectTimeout=10", "nl2", "hostname; echo a  b"],
        ["-x", "someone@nl2", "-p", "22", "-i", "key", "hostname;", "echo", "a", "b"],
        ["10.77.0.2", "sh -c 'hostname; echo a b'"],
        # From there on, too.
        ["nl3", "ssh nl2 'hostname; echo a b'"],
    ):
        assert said_by(netlab.on("nl1", ["ssh", *words])) == "nl2\na b\n"
    command = netlab.on("nl1", ["ssh", "elsewhere", "true"])
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 255
    assert "no host 'elsewhere'" in done.stderr


# --- links ----------------------------------------------------------------------------------------


@needs_netlab
@pytest.mark.parametrize("length", [50_000, 1_000_000])
def test_a_link_has_its_rate_for_short_and_for_long_messages(length: int) -> None:
    with Netlab(hosts=3, rate="20mbit") as network:
        for source, target in (("nl1", "nl2"), ("nl3", "nl1")):
            (took_s,) = seconds_to_send(network, source, target, length)
            exact_s = length / bytes_per_s("20mbit")
            # 16 kB pass at once; a busy machine may take long.
            assert 0.6 * exact_s < took_s < 3 * exact_s + 1.0


@needs_netlab
def test_a_host_receives_no_faster_than_it_sends() -> None:
    length = 500_000
    with Netlab(hosts=3, rate="20mbit") as network:
        address = "10.77.0.1"
        start = time.monotonic()
        program = RECEIVER.replace("9000", "9001")
        command = network.on("nl1", [sys.executable, "-c", program])
        with receiver(network, "nl1"), subprocess.Popen(command, stdout=subprocess.PIPE) as other:
            assert other.stdout is not None
            other.stdout.readline()
            start = time.monotonic()
            senders = [
                subprocess.Popen(
                    network.on(
                        host,
                        [
                            *(sys.executable, "-c", SENDER.replace("9000", port)),
                            *(address, str(length)),
                        ],
                    ),
                    stdout=subprocess.DEVNULL,
                )
                for host, port in (("nl2", "9000"), ("nl3", "9001"))
            ]
            assert [sender.wait(60) for sender in senders] == [0, 0]
            took_s = time.monotonic() - start
    assert took_s > 0.8 * 2 * length / bytes_per_s("20mbit")


@needs_netlab
def test_without_a_rate_a_link_is_fast(netlab: Network) -> None:
    (took_s,) = seconds_to_send(netlab, "nl1", "nl2", 10_000_000)
    assert took_s < 10_000_000 / bytes_per_s("100mbit")


@needs_netlab
def test_traffic_counts_both_ends(netlab: Network) -> None:
    before = {name: netlab.traffic(name) for name in netlab.names}
    seconds_to_send(netlab, "nl1", "nl2", 1_000_000)
    received = netlab.traffic("nl2").received_bytes - before["nl2"].received_bytes
    sent = netlab.traffic("nl1").sent_bytes - before["nl1"].sent_bytes
    elsewhere = netlab.traffic("nl3").sent_bytes - before["nl3"].sent_bytes
    assert 1_000_000 < received < 1_200_000
    assert abs(received - sent) < 10_000  # hosts look for each other, too
    assert elsewhere < 10_000


@needs_netlab
def test_what_is_sent_over_a_cut_link_arrives_when_it_is_mended(netlab: Network) -> None:
    with receiver(netlab, "nl2"):
        program = [sys.executable, "-c", SENDER.replace("0.1", "0.5"), "10.77.0.2", "10", "10"]
        command = netlab.on("nl1", program)
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as sender:
            assert sender.stdout is not None
            sender.stdout.readline()  # so the connection stands
            netlab.cut("nl2")
            try:
                time.sleep(1.5)
                assert sender.poll() is None
            finally:
                netlab.mend("nl2")
            assert float(sender.stdout.readline()) > 0.8
            assert sender.wait(60) == 0


# --- the lab as a whole ---------------------------------------------------------------------------


@needs_netlab
def test_labs_do_not_see_each_other(netlab: Network) -> None:
    before = netlab.traffic("nl2").received_bytes
    with Netlab(hosts=2) as other:
        assert other.names == netlab.names[:2]
        seconds_to_send(other, "nl1", "nl2", 1_000_000)
        assert other.traffic("nl2").received_bytes > 1_000_000
    assert netlab.traffic("nl2").received_bytes - before < 10_000
    assert said_by(netlab.on("nl1", ["ssh", "nl2", "hostname"])) == "nl2\n"


def machine() -> tuple[str, ...]:
    """What a lab could leave on the machine, but for processes."""
    links = said_by(["ip", "-brief", "link"])
    names = re.findall(r"^\S+", links, re.M)
    return os.uname().nodename, Path("/etc/hosts").read_text(), *names, said_by(["ip", "netns"])


@needs_netlab
def test_nothing_is_left() -> None:
    before = machine()
    with Netlab(hosts=2, rate="100mbit") as network:
        inside = subprocess.Popen(network.on("nl2", ["sh", "-c", "sleep 1000 & sleep 1000"]))
        detached = subprocess.Popen(network.on("nl1", ["setsid", "sleep", "1000"]))
        for process, name in (inside, "sh"), (detached, "sleep"):  # both are in the lab by then
            while psutil.Process(process.pid).name() != name:
                time.sleep(0.01)
        kept = [*network.keepers.values(), network.switch]
    assert are_gone(kept, within_s=0.0)
    assert inside.wait(10) == detached.wait(10) == -signal.SIGKILL
    assert machine() == before


@needs_netlab
def test_a_lab_goes_with_the_process_that_made_it() -> None:
    program = """
import psutil, subprocess, time
from tools.netlab import Netlab
with Netlab(hosts=2) as network:
    inside = subprocess.Popen(network.on("nl2", ["sleep", "1000"]))
    while psutil.Process(inside.pid).name() != "sleep":  # it is in the lab by then
        time.sleep(0.01)
    print(*network.keepers.values(), network.switch, inside.pid, flush=True)
    time.sleep(1000)
"""
    before = machine()
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY) as owner:
        assert owner.stdout is not None
        pids = [int(word) for word in owner.stdout.readline().split()]
        assert len(pids) == 4
        owner.kill()
    assert are_gone(pids)
    assert machine() == before


@needs_netlab
def test_a_rate_that_tc_refuses_is_told_and_nothing_is_left() -> None:
    before = machine()
    children = psutil.Process().children()
    with pytest.raises(NetlabError, match=r"tc refuses 'qdisc add dev port1 root tbf rate 1bit"):
        Netlab(hosts=2, rate="1bit").__enter__()
    assert psutil.Process().children() == children
    assert machine() == before


@needs_netlab
def test_a_host_that_is_not_there_is_told(netlab: Network) -> None:
    for call in (netlab.on, netlab.cut, netlab.mend, netlab.traffic):
        with pytest.raises(NetlabError, match="no host 'nl5': the hosts are nl1, nl2, nl3, nl4"):
            call("nl5")


@needs_netlab
def test_the_command_line(netlab: Network) -> None:
    # On a host of another lab, so that it meets nobody else's lab on this machine.
    def lab(*words: str) -> subprocess.CompletedProcess[str]:
        command = netlab.on("nl1", [sys.executable, "-m", "tools.netlab", *words])
        return subprocess.run(
            command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=False
        )

    def outcome(*words: str) -> tuple[int, str, str]:
        done = lab(*words)
        return done.returncode, done.stdout, done.stderr

    no_lab = (2, "", "error: no lab is up; `up P [RATE]` makes one\n")
    for words in (["exec", "1", "true"], ["bytes"], ["cut", "1"], ["mend", "nl1"]):
        assert outcome(*words) == no_lab
    assert outcome("up", "0") == (2, "", "error: hosts must be in [1, 254], got 0\n")
    assert outcome("up", "2", "fast")[2].startswith("error: a rate must be above 0")
    assert outcome("up", "2", "1bit")[2].startswith("error: tc refuses")
    assert outcome("up", "2", "1gbit") == (0, "", "")
    try:
        assert outcome("up", "3") == (2, "", "error: a lab is up already; `down` removes it\n")
        for host in ("2", "nl2"):
            assert outcome("exec", host, "hostname") == (0, "nl2\n", "")
        assert outcome("exec", "nl1", "sh", "-c", "exit 7")[0] == 7
        assert "rate 1Gbit" in outcome("exec", "1", "tc", "qdisc")[1]
        assert re.fullmatch(r"(nl\d sent \d+ received \d+\n){2}", lab("bytes").stdout)
        no_host = "error: no host 'nl3': the hosts are nl1, nl2\n"
        assert outcome("exec", "3", "true") == (2, "", no_host)
        carrier = ["exec", "1", "cat", "/sys/class/net/eth0/carrier"]
        for words, state in ((["cut", "1"], "0\n"), (["mend", "1"], "1\n")):
            assert outcome(*words) == (0, "", "")
            assert outcome(*carrier) == (0, state, "")
    finally:
        assert outcome("down") == (0, "", "")
    assert outcome("bytes") == no_lab
    assert outcome("down") == (0, "", "")


# --- where there can be no lab --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rate", "expected"),
    [("1gbit", 125e6), ("100Mbit", 12.5e6), ("1.5kbit", 187.5), ("8", 1.0), ("2mbps", 2e6)],
)
def test_rates(rate: str, expected: float) -> None:
    assert bytes_per_s(rate) == expected


@pytest.mark.parametrize("rate", ["", "fast", "0gbit", "-1gbit", "1 gbit", "nan", "1gbits"])
def test_a_rate_that_is_none_is_refused(rate: str) -> None:
    with pytest.raises(NetlabError, match=f"got {rate!r}"):
        Netlab(hosts=2, rate=rate)


@pytest.mark.parametrize("hosts", [-1, 0, 255])
def test_a_number_of_hosts_out_of_range_is_refused(hosts: int) -> None:
    with pytest.raises(NetlabError, match=re.escape(f"hosts must be in [1, 254], got {hosts}")):
        Netlab(hosts)


def test_another_user_is_told() -> None:
    was = os.geteuid()
    if was == 0:
        os.seteuid(65534)
    try:
        with pytest.raises(NetlabError, match="need root"):
            Netlab(hosts=2)
    finally:
        os.seteuid(was)


@pytest.mark.skipif(os.geteuid() != 0, reason="another user is told of root first")
def test_a_missing_program_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert missing() == "network namespaces need ip, of the package iproute2"
    with pytest.raises(NetlabError, match="need ip, of the package iproute2"):
        Netlab(hosts=2)

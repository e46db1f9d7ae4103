"""Memory without a name: found by who is told where, and gone with its processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hvd_sparse.hosts.shared import OwnSegment, SegmentAddress, int64_at, open_segment

NAME = "memfd:hvd_sparse"
OWNER = """
import json, sys
from hvd_sparse.hosts.shared import OwnSegment
own = OwnSegment(10_000)
own.segment[:10_000] = 7
print(json.dumps(own.address), flush=True)
sys.stdin.read()
"""


def test_a_killed_owner_leaves_its_memory_to_who_has_mapped_it_and_nothing_else() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        address = SegmentAddress(*json.loads(owner.stdout.readline()))
        segment = open_segment(address)
        owner.kill()
        owner.wait()
    assert segment[:10_000].eq(7).all()
    mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if NAME in line]
    assert mapped
    assert all(line.endswith("(deleted)") for line in mapped)  # in no folder, before and after
    with pytest.raises(OSError, match=str(address.pid)):
        open_segment(address)


def test_two_mappings_are_one_memory() -> None:
    own = OwnSegment(64)
    other = open_segment(own.address)
    own.hide()
    number = int64_at(other, 8)
    int64_at(own.segment, 8).fill_(5)
    assert int(number) == 5
    assert other.numel() >= 64


def test_what_is_hidden_cannot_be_opened_and_keeps_no_file() -> None:
    own = OwnSegment(64)
    other = open_segment(own.address)
    own.hide()
    files = [file for file in Path("/proc/self/fd").iterdir() if file.is_symlink()]
    assert not [file for file in files if NAME in os.readlink(file)]
    with pytest.raises(OSError, match="No such file"):
        open_segment(own.address)
    own.segment[0] = 9
    assert int(other[0]) == 9


def test_another_process_of_that_number_is_found_out() -> None:
    """As in a container with process numbers of its own."""
    own, other = OwnSegment(64), OwnSegment(64)
    larger = OwnSegment(100_000)
    with pytest.raises(OSError, match="its memory is another"):
        open_segment(other.address._replace(token=own.address.token))
    with pytest.raises(OSError, match="another size"):
        open_segment(own.address._replace(fd=larger.address.fd))
    for each in (own, other, larger):
        each.hide()


def test_a_segment_begins_as_zeros() -> None:
    own = OwnSegment(5000)
    own.hide()
    assert torch.equal(own.segment, torch.zeros_like(own.segment))

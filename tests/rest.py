"""What only `make faults` runs: the same again, on other transports, in other phases, or mixed."""

from __future__ import annotations

import os

import pytest

ALL = "HVD_SPARSE_FAULTS" in os.environ

rest = pytest.mark.skipif(not ALL, reason="`make faults` runs it")

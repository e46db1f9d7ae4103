"""What only `make faults` runs: the same over again, on other transports or in other phases."""

from __future__ import annotations

import os

import pytest

ALL = "HVD_SPARSE_FAULTS" in os.environ

rest = pytest.mark.skipif(not ALL, reason="`make faults` runs it")

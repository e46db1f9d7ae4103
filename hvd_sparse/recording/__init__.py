"""Recordings of a run: written by `Recorder`, read by `hvd-sparse report` and `trace`."""

from hvd_sparse.recording.recorder import Recorder

__all__ = ["Recorder"]

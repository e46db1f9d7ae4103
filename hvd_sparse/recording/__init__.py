"""Recordings of runs. `Recorder` writes them; `hvd-sparse report`, `top` and `trace` read them."""

from hvd_sparse.recording.recorder import Recorder

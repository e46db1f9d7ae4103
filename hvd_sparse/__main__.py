"""Runs the `hvd-sparse` command, as `python -m hvd_sparse`."""

import sys

from hvd_sparse.cli.main import main

if __name__ == "__main__":
    sys.exit(main())

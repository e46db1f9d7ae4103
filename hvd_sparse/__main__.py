"""`python -m hvd_sparse` is the `hvd-sparse` command."""

import sys

from hvd_sparse.cli.main import main

if __name__ == "__main__":
    sys.exit(main())

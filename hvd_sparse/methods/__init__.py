"""Methods by name: how a bucket's entries are selected, remembered and exchanged.

A method's options know neither Horovod nor a transport. `make()` gives the `Method` that an engine,
a plan or a policy uses; `hvd_sparse.Compression` puts it behind Horovod's `compression=`.

    method = METHODS["oktopk"](density=0.02).make()

`catalogue.py` has the methods, and `METHODS` at its end; a new one is a class and an entry there.
"""

from hvd_sparse.methods.catalogue import METHODS, DgcOptions

"""Methods by name: how a bucket's entries are selected, remembered and exchanged.

A method's options know neither Horovod nor a transport. `make()` gives the `Method` that an engine,
a plan or a policy uses; `hvd_sparse.Compression` puts it behind Horovod's `compression=`.

    method = METHODS["oktopk"](density=0.02).make()

A new method is a class in a file here, and an entry in `METHODS`.
"""

from collections.abc import Mapping
from types import MappingProxyType

from hvd_sparse.methods.dgc_options import DgcOptions, DragonnOptions
from hvd_sparse.methods.exclusive_options import CltkOptions, ExdynaOptions
from hvd_sparse.methods.fitted_options import GaussiankOptions, MstopkOptions, SidcoOptions
from hvd_sparse.methods.method_options import MethodOptions
from hvd_sparse.methods.oktopk_options import OktopkOptions
from hvd_sparse.methods.topk_options import HardThresholdOptions, RandomkOptions, TopkOptions

METHODS: Mapping[str, type[MethodOptions]] = MappingProxyType(
    {
        options.name: options
        for options in (
            TopkOptions,
            OktopkOptions,
            DgcOptions,
            DragonnOptions,
            ExdynaOptions,
            CltkOptions,
            GaussiankOptions,
            SidcoOptions,
            MstopkOptions,
            HardThresholdOptions,
            RandomkOptions,
        )
    }
)

__all__ = ["METHODS", "DgcOptions", "MethodOptions"]

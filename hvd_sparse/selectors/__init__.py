"""Selectors: which entries leave the accumulator.

Any selector goes with any memory and any collective. The first operation on an accumulator adds the
gradients in the same pass; what is not finite is taken in any case.

* A selector holds nnz within 10 % of k in the same step: excess goes back
  (`correction.keep_largest`, O(nnz)), missing entries are taken (`take_more`, one more pass).
  Gaussiank and the hard threshold do not.
* No rank sends more than four times k entries in a step. What a selector takes beyond that goes
  back, the smallest first (`correction.hold_back`), and `stats()` counts it as `nnz_held_back`. One
  entry that is not finite is enough to tell all ranks that a step does not count.
* A `Scope` says where a rank may select, and its share of k: `Collective.scope()`. ExDyna's
  partition and CLT-k's leader are scopes, so they work with every selector.
* Random choices are functions of a seed and the step (`selector.mixed`), so that a restored state
  continues with the same bits.
"""

from hvd_sparse.selectors.bisection import BisectionTopK
from hvd_sparse.selectors.exact import ExactTopK
from hvd_sparse.selectors.fitted import GaussianThreshold, SidcoThreshold
from hvd_sparse.selectors.grouped import GroupedTopK
from hvd_sparse.selectors.hard import HardThreshold
from hvd_sparse.selectors.hashed import HashedExtraction
from hvd_sparse.selectors.online import OnlineThreshold
from hvd_sparse.selectors.random_k import RandomK
from hvd_sparse.selectors.reused import ReusedThreshold
from hvd_sparse.selectors.sampled import SampledThreshold
from hvd_sparse.selectors.selector import Selector
from hvd_sparse.selectors.thresholded import ThresholdSelector

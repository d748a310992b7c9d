"""The zoo: models that tests train at tiny sizes and benchmarks at real ones.

    from benchmarks.models import TINY, small_five, twelve
    case = TINY["gpt"]
    args, kwargs = case.sample()
    case.loss(case.build()(*args, **kwargs)).backward()

`TINY` has one case for each kind of model that rematch promises to train; `twelve` and `small_five` are the models of
HiRemate's tables, at this machine's sizes or at the paper's.
"""

from .cases import TINY, Case, small_five, twelve

__all__ = ["TINY", "Case", "small_five", "twelve"]

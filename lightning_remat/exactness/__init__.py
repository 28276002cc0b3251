"""Is the planned step bit for bit eager's? Both are run and compared, and what differs first is named."""

from lightning_remat.exactness._bits import digest, same_bits
from lightning_remat.exactness._check import check
from lightning_remat.exactness._compare import Runs, compare, cut, is_out_of_memory, size_of
from lightning_remat.exactness._outcome import Difference, Kind
from lightning_remat.exactness._report import CheckReport, Verdict
from lightning_remat.exactness._state import State, is_foreign, undoing
from lightning_remat.exactness._trace import Cause, FirstDifference

__all__ = [
    "Cause",
    "CheckReport",
    "Difference",
    "FirstDifference",
    "Kind",
    "Runs",
    "State",
    "Verdict",
    "check",
    "compare",
    "cut",
    "digest",
    "is_foreign",
    "is_out_of_memory",
    "same_bits",
    "size_of",
    "undoing",
]

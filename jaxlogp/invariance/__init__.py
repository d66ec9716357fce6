"""Sums of a fixed order, and reports on bits: changes that keep them, and differences between sampler and trainer."""

from jaxlogp._replicas import nan_unless_equal
from jaxlogp.invariance.check import Difference, InvarianceReport, check_invariance
from jaxlogp.invariance.drift import DriftReport, drift_report
from jaxlogp.invariance.order import ReductionOrder, fixed_order_sum

__all__ = [
    "check_invariance",
    "Difference",
    "drift_report",
    "DriftReport",
    "fixed_order_sum",
    "InvarianceReport",
    "nan_unless_equal",
    "ReductionOrder",
]

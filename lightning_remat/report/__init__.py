"""What a person reads: sizes and times in words, tables that compare plans, and pictures of memory over time."""

from lightning_remat.report._curve_figure import curve_figure
from lightning_remat.report._plan_table import PlanLike, plan_table
from lightning_remat.report._timeline_figure import timeline_figure
from lightning_remat.report._units import format_bytes, format_seconds

__all__ = ["PlanLike", "curve_figure", "format_bytes", "format_seconds", "plan_table", "timeline_figure"]

"""What a person reads: sizes and times in words, tables, pictures of memory over time, and pages about plans.

* ``_units``: bytes and seconds in words. ``_plan_table``: plans, one a row. ``_timeline_figure``, ``_curve_figure``: pictures.
* ``_analysis``: all that is said of a plan, computed once, of ``_replay`` (what is held when, and why), ``_course`` (that
  over time), ``_modules`` and ``_changes`` (what would help); ``_subject`` is what is read of a plan.
* ``_page`` makes a page of that, ``_compared`` one of two plans, ``_explain`` words, ``_notebook`` what a notebook shows.
  ``_html`` has the pieces of pages, and ``_drawing`` is all that knows Bokeh.
"""

from lightning_remat.report._analysis import Analysis, analyse
from lightning_remat.report._changes import TradePoint
from lightning_remat.report._compared import compared_page
from lightning_remat.report._curve_figure import curve_figure
from lightning_remat.report._explain import explanation
from lightning_remat.report._notebook import notebook_view
from lightning_remat.report._page import report_page
from lightning_remat.report._plan_table import PlanLike, plan_table
from lightning_remat.report._timeline_figure import plan_figure, timeline_figure
from lightning_remat.report._units import format_bytes, format_seconds

__all__ = [
    "Analysis",
    "PlanLike",
    "TradePoint",
    "analyse",
    "compared_page",
    "curve_figure",
    "explanation",
    "format_bytes",
    "format_seconds",
    "notebook_view",
    "plan_figure",
    "plan_table",
    "report_page",
    "timeline_figure",
]

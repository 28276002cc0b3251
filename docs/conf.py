"""The settings of the site that `make docs` builds of this folder: no network, warnings are errors."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from generated import rewritten, write_pages  # noqa: E402

from lightning_remat import __version__  # noqa: E402

project = "lightning_remat"
author = copyright = "The lightning_remat developers"  # noqa: A001
version = release = __version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_design",
]
exclude_patterns = ["generated/options.md", "generated/commands.md", "generated/papers/*"]
"""What pages include is no page itself."""
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4
suppress_warnings = ["myst.header"]
default_role = "code"

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
autodoc_class_signature = "mixed"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False
python_use_unqualified_type_names = True
add_module_names = False

nitpicky = True
nitpick_ignore_regex = [(r"py:.*", r"(?!lightning_remat).*")]
"""References to this project's names must resolve; those to other libraries have nothing here to resolve to."""
nitpick_ignore = [
    ("py:class", "lightning_remat.runtime._step.ScheduledStep"),
    ("py:class", "lightning_remat.graph._graph._Made"),
    ("py:class", "lightning_remat.solvers.hiremate._partition.Partitioner"),
    ("py:class", "lightning_remat.capture._call.OpCall"),
]
"""What stands in public signatures and is not public itself."""

html_theme = "furo"
html_title = f"lightning_remat {__version__}"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_show_sphinx = False
html_copy_source = False
html_show_search_summary = False
pygments_style = "friendly"
copybutton_exclude = ".linenos, .gp, .go"


def setup(app: object) -> None:
    """Write what is generated of the code, and have links into the repository lead to pages of the site."""
    write_pages(HERE / "generated")
    app.connect("source-read", lambda _app, page, source: source.__setitem__(0, rewritten(source[0], page)))  # type: ignore[attr-defined]

"""How Sphinx builds these pages: ``python -m sphinx -W -b html docs build/docs``."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE / "extensions")]

project = "host-to-device-transfer"
author = "the contributors"
html_title = project
html_theme = "furo"
html_static_path = ["static"]
html_css_files = ["tables.css"]
html_show_sphinx = False
html_show_copyright = False

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "config_keys"]
exclude_patterns = ["build"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

napoleon_numpy_docstring = False
napoleon_use_ivar = True
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"

# Links to other hosts are reported by `-b linkcheck`, and no failure of a build.
linkcheck_anchors = False
linkcheck_timeout = 10

"""How Sphinx builds these pages: ``python -m sphinx -W -b html docs build/docs``."""

import inspect
import sys
from pathlib import Path
from typing import Any

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

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "tables_of_code"]
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


def constructor(_app: Any, what: str, _name: str, described: Any, *_rest: Any) -> tuple[str, None] | None:
    """The arguments of ``__init__``, where a class has a ``__new__`` that takes any."""
    if what != "class" or "__new__" not in vars(described):
        return None
    given = inspect.signature(described.__init__)
    bare = [each.replace(annotation=inspect.Parameter.empty) for each in given.parameters.values()]
    return str(given.replace(parameters=bare[1:], return_annotation=inspect.Signature.empty)), None


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.connect("autodoc-process-signature", constructor)

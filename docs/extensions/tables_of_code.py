"""Directives for tables that the code makes: ``config-keys`` and ``copy-sites``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import config_tables
import site_tables
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective


def directive(markdown: Callable[[], list[str]]) -> type[SphinxDirective]:
    """A directive without arguments and content, in whose place stands what ``markdown`` makes."""

    class Table(SphinxDirective):
        def run(self) -> list[nodes.Node]:
            return self.parse_text_to_nodes("\n".join(markdown()), allow_section_headings=True)

    return Table


def setup(app: Sphinx) -> dict[str, Any]:
    """Called by Sphinx."""
    app.add_directive("config-keys", directive(config_tables.markdown))
    app.add_directive("copy-sites", directive(site_tables.markdown))
    return {"parallel_read_safe": True, "parallel_write_safe": True}

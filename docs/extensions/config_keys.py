"""The directive ``config-keys``: every key of the configuration, from the models that check it."""

from __future__ import annotations

from typing import Any

from config_tables import markdown
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective


class ConfigKeys(SphinxDirective):
    """``{config-keys}``: takes no argument and no content."""

    def run(self) -> list[nodes.Node]:
        return self.parse_text_to_nodes("\n".join(markdown()), allow_section_headings=True)


def setup(app: Sphinx) -> dict[str, Any]:
    """Called by Sphinx."""
    app.add_directive("config-keys", ConfigKeys)
    return {"parallel_read_safe": True, "parallel_write_safe": True}

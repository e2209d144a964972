"""Every copy of training state that ZeRO-3 makes, as Markdown, from the list that the code goes by."""

from __future__ import annotations

from transfer.zero3.stage3.sites import COPY_SITES, IMPOSSIBLE, LEFT, SERVED

#: Heading and what is said below it, for each answer.
HEADINGS = {
    SERVED: ("Served", "This package makes these.", "How"),
    LEFT: ("Left alone", "DeepSpeed's own code makes these, as without this package.", "Why"),
    IMPOSSIBLE: ("Not possible from outside", "DeepSpeed's own code makes these.", "Why"),
}


def markdown() -> list[str]:
    """A section with a list for each answer, as lines of Markdown."""
    lines: list[str] = []
    for answer, (heading, sentence, question) in HEADINGS.items():
        lines += [f"## {heading}", "", sentence, ""]
        for site in COPY_SITES:
            if site.answer != answer:
                continue
            # Without module and class: nearly all are of one.
            names = dict.fromkeys(function.rpartition(":")[2].rpartition(".")[2] for function in site.functions)
            versions = " to ".join(dict.fromkeys(site.versions))
            where = ", ".join(f"`{name}`" for name in names)
            lines += [f"**{site.name}**", f": {site.what}.", f": *{question}:* {site.reason}."]
            lines += [f": *Where:* {where}, in DeepSpeed {versions}.", ""]
    return lines

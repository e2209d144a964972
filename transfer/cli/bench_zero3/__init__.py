"""``h2d bench zero3``: whole ZeRO-3 steps, with and without this package."""

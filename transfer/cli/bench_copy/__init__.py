"""``h2d bench``: single copies, beside what others do."""

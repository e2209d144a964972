"""What the measuring commands share: ranks, baselines, options, tables."""

"""From files to the global batch of a step, a pure function of (data seed, step)."""

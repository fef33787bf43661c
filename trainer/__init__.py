"""WHEN it is computed: configuration, data, the loop, checkpoints, metrics and commands."""

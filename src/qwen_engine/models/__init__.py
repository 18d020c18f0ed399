"""Model definitions and how checkpoints become parameters."""

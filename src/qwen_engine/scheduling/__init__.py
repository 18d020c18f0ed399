"""Which tokens are computed in which step, and where their KV lies. Plain Python, free of torch."""

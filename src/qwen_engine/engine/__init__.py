"""The running engine: memory, model runner, the core loop, and outputs put together for users."""

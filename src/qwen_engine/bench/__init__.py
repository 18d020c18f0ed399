"""Benchmarks of the engine and the result files they leave. `cli` calls this package; it drives `llm.LLM`."""

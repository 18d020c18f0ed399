"""The OpenAI-compatible HTTP server: the API process (`app`, `service`, everything it uses) and the engine's process.

The API process speaks HTTP and does all work on text; it never imports torch. `engine_process` is the other one.
"""

"""The user's side of the engine, torch-free: prompts to sequences (`input_processor`), tokens to outputs
(`output_processor`). `LLM` uses it in the engine's process, the server in the process that speaks HTTP.
"""

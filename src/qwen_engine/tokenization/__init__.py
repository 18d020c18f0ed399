"""Text in and text out: tokenizer, chat template, incremental detokenizer, stop strings. Nothing here imports torch.

`Tokenizer` turns text and chats into ids; one `OutputText` per sequence turns its ids back into text as they arrive.
"""

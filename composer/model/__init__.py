"""The transformer, its parts, its presets and its tokenizer."""

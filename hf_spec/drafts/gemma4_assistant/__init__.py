"""Gemma 4's assistants, drafts of transformers that read the keys and values of their target."""

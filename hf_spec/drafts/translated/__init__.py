"""Draft tokens of a language model with another tokenizer."""

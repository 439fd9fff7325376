"""Run any model of transformers over a forest of tokens."""

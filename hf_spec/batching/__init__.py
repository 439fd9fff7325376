"""Guesses for the requests of transformers' continuous batching, which come and go at any moment."""

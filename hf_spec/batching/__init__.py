"""Speculative decoding in transformers' continuous batching, where requests come and go at any moment."""

"""Medusa heads: config, model, files, engines."""

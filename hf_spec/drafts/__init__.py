"""Drafts: a folder for each kind, and beside the folders what kinds share."""

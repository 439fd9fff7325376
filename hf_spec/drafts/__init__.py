"""Drafts: a folder for each kind, and next to the folders what kinds share."""

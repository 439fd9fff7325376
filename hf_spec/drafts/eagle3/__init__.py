"""EAGLE-3 drafts: config, model, files, engines."""

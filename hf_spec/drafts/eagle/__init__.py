"""EAGLE-1 and EAGLE-2 drafts: config, model, files, engines."""

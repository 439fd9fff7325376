"""DSpark drafts: config, model, files, engines."""

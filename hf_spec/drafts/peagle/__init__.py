"""P-EAGLE drafts: config, model, files, engines."""

"""DFlash drafts: config, model, files, engines."""

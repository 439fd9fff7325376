"""DFlash2 drafts: config, model, files, engines."""

"""Multi-token-prediction layers: config, models, files, engines."""

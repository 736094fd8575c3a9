"""Training draft heads and draft models for a target, from text that the target writes itself."""

"""The terminal: console, progress bars, options that verbs share."""

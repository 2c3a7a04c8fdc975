"""Tasks, one file a kind."""

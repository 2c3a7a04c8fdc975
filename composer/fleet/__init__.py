"""Roles of a run, in threads or in processes."""

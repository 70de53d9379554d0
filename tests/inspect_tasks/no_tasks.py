"""A file without tasks."""

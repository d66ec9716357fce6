"""Integrations of the library in other trainers; each folder needs the extra of its name."""

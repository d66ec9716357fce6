"""Programs that measure one question each and write a report."""

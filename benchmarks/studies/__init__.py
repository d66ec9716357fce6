"""Programs that each measure one question and print a table."""

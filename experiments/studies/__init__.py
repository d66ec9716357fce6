"""Programs that each answer one question by measuring, and write a report."""

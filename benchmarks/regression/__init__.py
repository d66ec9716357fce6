"""A guard for the speed that README claims: its ratios measured again, and compared with those that are kept."""

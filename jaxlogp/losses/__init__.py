"""Policy losses as unreduced sums."""

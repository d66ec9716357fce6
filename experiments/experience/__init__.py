"""Sources of documents: the built-in rollouts, and functions and classes of your own."""

"""Log-probs on the support from which each token was drawn."""

"""Drift, masks and the gradient filter on the hidden states of a real model."""

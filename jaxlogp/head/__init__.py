"""The language-model head: log-probs and entropy straight from hidden states and head weight, with several engines."""

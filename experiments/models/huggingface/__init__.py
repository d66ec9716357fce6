"""Hugging Face checkpoint directories: read into a `Decoder` and written so that transformers loads them."""

"""Transformers on sequences of token vectors; needs torch and einops, and nothing else of this package."""

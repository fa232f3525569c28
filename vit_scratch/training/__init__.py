"""The training loop and what it needs; knows no model, no image and no token."""

"""Metrics and pictures of trained models."""

"""Experiments with fixed settings."""

"""Adapters on Flower."""

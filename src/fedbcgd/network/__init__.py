"""Simulated networks: links of unequal clients, a virtual clock, deadlines and faults (docs/network.md)."""

"""Clients are unequal: links, a virtual clock, deadlines, faults, and blocks that fit the links (docs/network.md)."""

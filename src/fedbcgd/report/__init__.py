"""Runs on disk, shown: the page and its server, hours on networks, `doctor`."""

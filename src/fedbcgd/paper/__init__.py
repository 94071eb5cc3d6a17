"""The tables and figures of the paper, each from one command."""

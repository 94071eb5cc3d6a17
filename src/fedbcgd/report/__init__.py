"""What a person sees: progress, tables, plots."""

"""What remembers and shows what happened: decisions, metrics, audits, recordings."""

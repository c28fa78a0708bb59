"""Statistics of ledgers, comparisons of them, and their reports."""

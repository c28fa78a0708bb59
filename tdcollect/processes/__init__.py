"""Child processes of the package: how they start, answer and end; imports no torch."""

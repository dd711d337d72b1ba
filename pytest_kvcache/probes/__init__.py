"""Scripts that score a text inside an engine's own interpreter. They import nothing of this package: it need not be there."""

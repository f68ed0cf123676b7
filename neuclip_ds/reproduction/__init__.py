"""The papers' comparisons in miniature: the same data, towers, budget and search for every method."""

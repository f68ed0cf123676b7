"""Estimators of the anchors' normalisers, one a file."""

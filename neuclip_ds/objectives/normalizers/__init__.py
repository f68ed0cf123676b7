"""Estimators of the anchors' normalizers, one a file."""

"""Estimators of the anchors' normalizers, one per module."""

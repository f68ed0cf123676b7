"""Estimators of the anchors' normalizers, one per module, and the code that they share."""

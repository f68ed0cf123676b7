"""Comparison of methods with small towers, over paired seeds; tools/reproduce.py runs it."""

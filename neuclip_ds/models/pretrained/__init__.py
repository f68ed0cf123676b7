"""Dual encoders and towers with the weights of other libraries."""

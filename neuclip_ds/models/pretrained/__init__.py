"""Pretrained dual encoders and towers of other libraries."""

"""Pretrained dual encoders and towers from other libraries."""

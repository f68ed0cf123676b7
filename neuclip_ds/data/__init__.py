"""Data loading: tar shards -> manifest -> sample order -> batches. The manifest fixes each sample's global index."""

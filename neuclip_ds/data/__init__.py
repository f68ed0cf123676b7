"""Data loading: tar shards -> manifest -> sample order -> batches. The manifest defines each sample's global index."""

"""Data loading: shards -> manifest -> order -> batches. The manifest fixes every sample's index permanently."""

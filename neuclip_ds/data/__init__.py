"""The data engine: shards -> manifest -> order -> batches. A sample's index is fixed by the manifest for ever."""

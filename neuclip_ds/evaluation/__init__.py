"""Evaluation on held-out data, sharded over all ranks: retrieval, zero-shot classification and DataComp's tasks."""

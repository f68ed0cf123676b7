"""Evaluation on held-out data, shared by all ranks: retrieval, zero-shot classification, DataComp's tasks."""

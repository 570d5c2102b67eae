"""Weights from trainer to engines: gather shards as Hugging Face tensors, bucket them, send them, set the version."""

"""What a run reports: the registry of metric names, the step line, metrics.jsonl and TensorBoard."""

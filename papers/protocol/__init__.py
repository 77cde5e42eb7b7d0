"""What the experiments share: options, data, training, baselines, measures, claims and the report of their results."""

"""Functions of a posterior that `laplace` gives by name, and where they are: all that is known of them elsewhere."""

EXTENSIONS = {
    "laplace.extensions.acquisition": "acquire",
    "laplace.extensions.confidence": "confidence_bound",
    "laplace.extensions.conformal": "conformal",
    "laplace.extensions.continual": "TaskFit TaskMemory TaskResult continual_training quadratic_penalty train_task",
    "laplace.extensions.distances": "kl saliency wasserstein",
    "laplace.extensions.drawn": "draw",
    "laplace.extensions.export": "export",
    "laplace.extensions.influence": "influence label_errors",
    "laplace.extensions.merging": "from_optimizer merge",
    "laplace.extensions.mimo": "MimoBatches from_mimo mimo_loss mimo_outputs",
    "laplace.extensions.ood": "ood_score ood_scorer",
    "laplace.extensions.projected": "projected",
    "laplace.extensions.removal": "forget_with_mean",
    "laplace.extensions.report": "report",
    "laplace.extensions.rewards": "pessimistic",
    "laplace.extensions.snapshots": "snapshots",
    "laplace.extensions.volumes": "totals",
}
"""Module → names that are imported from it when they are first read, separated by spaces."""

NAMES = frozenset(" ".join(EXTENSIONS.values()).split())
"""All names."""

"""Where an operation is dear: how many a fit, a prediction and an evidence take, and that their numbers stay."""

"""Which uncertainty method predicts best: networks trained as people train them, scored on data that none has seen."""

"""Draft heads for a model, trained on what the model itself writes. Stages restart from files.

`python -m chatkv.spec.train STAGE` runs one stage under a clock: distill, vocabulary, train,
measure, export.
"""

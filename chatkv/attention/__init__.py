"""Attention over paged keys and values: tensors in, tensors out. Knows no sequence and no model."""

"""Recurrent mixers of transformers' layers, a file for each kind: weights and projections, for either device."""

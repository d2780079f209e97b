"""The target out of a checkpoint: transformers' definition, with the parts that trees need in place of its own."""

"""The verify step as one graph a (batch, nodes) bucket over static buffers: CUDA, and any device without graphs."""

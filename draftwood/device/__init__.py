"""What the machine offers and how a service uses it: placement, compilation, graphs, packed layers."""

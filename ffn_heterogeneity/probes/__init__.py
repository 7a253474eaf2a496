"""Probes: small statistics of what a layer saw, computed inside the layer scan."""

"""Probes: small statistics of what a layer saw, computed inside the layer scan."""

from ffn_heterogeneity.probes.base import Probe
from ffn_heterogeneity.probes.displacement import DISPLACEMENT, DISPLACEMENT_AFTER_NORM

# Name -> probe; a config logs one with `config.monitors.<any> = {"probe": <name>}`.
PROBES: dict[str, Probe] = {
    "displacement": DISPLACEMENT,
    "displacement_after_norm": DISPLACEMENT_AFTER_NORM,
}

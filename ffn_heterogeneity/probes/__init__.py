"""Probes: small statistics of a layer's tensors, computed inside the layer scan."""

from ffn_heterogeneity.probes.base import Probe
from ffn_heterogeneity.probes.displacement import DISPLACEMENT, DISPLACEMENT_AFTER_NORM

# Name -> probe; to log one, set `config.monitors.<any> = {"probe": <name>}`.
PROBES: dict[str, Probe] = {
    "displacement": DISPLACEMENT,
    "displacement_after_norm": DISPLACEMENT_AFTER_NORM,
}

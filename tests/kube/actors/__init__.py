"""The actors of a simulated cluster: operator, scheduler, kubelet, workers, each a small loop.

Every actor talks to the API server over HTTP alone and can be configured to misbehave.
"""

from tests.kube.actors.simulation import Simulation, living, nothing, simulation

__all__ = ["Simulation", "living", "nothing", "simulation"]

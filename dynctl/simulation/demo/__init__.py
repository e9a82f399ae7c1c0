"""The demo fleet: engine processes and a frontend, and the steps of `dynctl demo`."""

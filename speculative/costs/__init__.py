"""Costs of a step of decoding: estimated from the models and the kind of device, or measured."""

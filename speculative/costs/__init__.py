"""What a step of decoding costs: estimated from the models and the kind of device, or measured."""

"""One forward of the network: packing, the model runner, compiled steps."""

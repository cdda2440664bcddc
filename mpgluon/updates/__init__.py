"""How weights are updated: FP32 masters, rounded updates of weights without masters, averages."""
